"""Threads that share a model take turns; when they do not, one of them is told so."""

from __future__ import annotations

import threading

import pytest
import torch
from models import (
    assert_same,
    assert_still_streams,
    backward_step,
    batch,
    blocks,
    build_lora,
    gradients,
    hooked,
    logits,
    same_bits,
)

import trae_mem


def in_thread(function) -> list[Exception]:
    """Runs the function in a thread of its own; the exception that ended it, if one did."""
    errors = []

    def run() -> None:
        try:
            function()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors


@pytest.mark.parametrize("index", [0, 3])
def test_a_second_thread_is_refused_while_a_block_runs(index, debug):
    model = trae_mem.enable(build_lora(), debug=debug)
    resident = build_lora()
    errors = []

    def use_in_another_thread(*args):
        errors.extend(in_thread(lambda: model(**batch(1))))

    with hooked(blocks(model)[index].mlp.register_forward_hook, use_in_another_thread):
        output = logits(model)
    assert [type(error) for error in errors] == [trae_mem.TraeMemError]
    assert "two threads" in str(errors[0])
    assert same_bits(output, logits(resident))
    assert_still_streams(model)


def test_a_second_thread_that_runs_between_two_blocks_makes_the_first_one_fail(debug):
    model = trae_mem.enable(build_lora(), debug=debug)
    resident = build_lora()
    inside, go_on = threading.Event(), threading.Event()
    outputs = []

    def wait_inside(*args):
        inside.set()
        go_on.wait(60)

    def second() -> None:
        with hooked(blocks(model)[5].mlp.register_forward_hook, wait_inside), torch.no_grad():
            outputs.append(model(input_ids=batch(1)["input_ids"]).logits)

    thread = threading.Thread(target=second)

    def let_second_in(*args):
        if threading.current_thread() is not thread:
            thread.start()
            inside.wait(60)

    block = blocks(model)[2]
    try:
        with (
            hooked(block.register_forward_hook, let_second_in),  # ours has released the unit
            pytest.raises(trae_mem.TraeMemError, match="two threads"),
        ):
            model(**batch())
    finally:
        go_on.set()
        thread.join()
    assert same_bits(outputs[0], resident(input_ids=batch(1)["input_ids"]).logits)
    assert_still_streams(model)


def test_threads_that_take_turns(debug):
    model, resident = trae_mem.enable(build_lora(), debug=debug), build_lora()
    for number in range(3):
        outputs = []
        assert not in_thread(lambda n=number, out=outputs: out.append(logits(model, n)))
        assert same_bits(outputs[0], logits(resident, number))
    assert_still_streams(model)


def test_a_backward_in_another_thread(debug):
    model, resident = trae_mem.enable(build_lora(), debug=debug), build_lora()
    loss = model(**batch()).loss
    assert not in_thread(loss.backward)
    backward_step(resident)
    assert_same(gradients(model), gradients(resident))


def test_a_thread_that_failed_leaves_the_model_to_others():
    model = trae_mem.enable(build_lora())

    def fail(*args):
        raise ValueError

    with hooked(blocks(model)[3].mlp.register_forward_hook, fail):
        assert [type(error) for error in in_thread(lambda: logits(model))] == [ValueError]
    assert_still_streams(model)
