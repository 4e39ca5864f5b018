"""A forked child has the weights but not the threads that load them."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from children import run_python
from models import (
    assert_same,
    assert_still_streams,
    backward_step,
    build_lora,
    logits,
    same_bits,
    state_of,
)

import trae_mem


def in_child(function) -> int:
    """Runs the function in a forked child and returns its exit code; 99 for an exception."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        code = 99
        try:
            code = function()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture(params=["ram", "file"])
def forked(request, checkpoints):
    source = checkpoints["llama"] if request.param == "file" else "ram"
    model = trae_mem.enable(build_lora(), source=source)
    backward_step(model)
    model.zero_grad()
    return model


def test_use_in_a_forked_child_is_an_error_that_says_so(forked):
    def child() -> int:
        errors = 0
        for use in (logits, backward_step, trae_mem.status):
            try:
                use(forked)
            except trae_mem.TraeMemError as error:
                errors += "forked" in str(error) and str(os.getpid()) in str(error)
        return errors

    assert in_child(child) == 3
    assert_still_streams(forked)


def test_a_forked_child_reads_the_weights(forked):
    expected = state_of(forked)
    assert in_child(lambda: assert_same(state_of(forked), expected) or 7) == 7


def test_a_forked_child_may_enable_the_model_anew(forked):
    expected = logits(build_lora())

    def child() -> int:
        trae_mem.disable(forked)
        resident = same_bits(logits(forked), expected)
        trae_mem.enable(forked)
        return 7 if resident and same_bits(logits(forked), expected) else 1

    assert in_child(child) == 7
    assert_still_streams(forked)


def test_workers_of_a_data_loader_are_forked_children(forked):
    loader = torch.utils.data.DataLoader(range(4), num_workers=2, multiprocessing_context="fork")
    assert len(list(loader)) == 4
    assert_still_streams(forked)


def test_a_forked_child_ends_as_any_process_does():
    """All of Python's and C++'s endings run, with copies in flight when it was forked."""
    output = run_python(
        """
        import os, signal, sys
        import trae_mem
        from models import backward_step, build_lora

        device = trae_mem.HostDevice(random_delay_us=2000)
        model = trae_mem.enable(build_lora(), device=device)
        backward_step(model)
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            sys.exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        backward_step(model)
        """
    )
    assert output.split() == ["0"]
