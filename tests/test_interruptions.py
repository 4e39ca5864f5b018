"""A step that ends in the middle: an error or Ctrl-C loses that step, never the next one."""

from __future__ import annotations

import pytest
import torch
from models import (
    UNITS,
    GroupedStack,
    Stack,
    assert_same,
    assert_same_tensors,
    assert_same_trace,
    assert_still_streams,
    assert_unharmed,
    backward_step,
    batch,
    blocks,
    build_lora,
    gradients,
    hooked,
    logits,
    numbers,
    same_bits,
    stack_step,
    state_of,
    train,
    use_checkpointing,
)

import trae_mem
from trae_mem.runtime import find_runtime


class Failure(Exception):
    pass


@pytest.fixture(
    params=[("none", None), ("none", "poison"), ("non-reentrant", "poison"), ("reentrant", None)]
)
def model(request):
    """A model that streams, in each mode of checkpointing."""
    model = build_lora()
    model.checkpointing, debug = request.param
    use_checkpointing(model, model.checkpointing)
    model.train()
    return trae_mem.enable(model, prefetch=1, debug=debug)


def interrupt(*args) -> None:
    raise KeyboardInterrupt


def fail(*args) -> None:
    raise Failure


@pytest.mark.parametrize("index", [0, 3])
@pytest.mark.parametrize(
    ("place", "action"),
    [("before", interrupt), ("inside", fail), ("inside", interrupt), ("after", interrupt)],
)
def test_a_forward_that_ends_in_a_block(model, place, action, index):
    block = blocks(model)[index]
    register = {
        "before": block.register_forward_pre_hook,
        "inside": block.mlp.register_forward_hook,
        "after": block.register_forward_hook,
    }[place]
    with hooked(register, action), pytest.raises((Failure, KeyboardInterrupt)):
        backward_step(model)
    assert_still_streams(model, getattr(model, "checkpointing", "none"))


@pytest.mark.parametrize("index", [0, 3, UNITS - 1])
@pytest.mark.parametrize("action", [fail, interrupt])
def test_a_backward_that_ends_in_a_block(model, action, index):
    def interrupt_gradient(module, args, output):
        if output.requires_grad:
            output.register_hook(action)

    with hooked(blocks(model)[index].mlp.register_forward_hook, interrupt_gradient):
        loss = model(input_ids=torch.arange(8)[None]).logits.square().mean()
        with pytest.raises((Failure, KeyboardInterrupt)):
            loss.backward()
    assert_still_streams(model, getattr(model, "checkpointing", "none"))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("action", [fail, interrupt])
@pytest.mark.parametrize("index", [0, 2, UNITS - 1])
def test_a_recomputation_that_ends_in_a_block(index, action, use_reentrant, debug):
    resident, model = GroupedStack(2, use_reentrant), GroupedStack(2, use_reentrant)
    trae_mem.enable(model, prefetch=1, debug=debug)
    loss = model(numbers()).square().mean()
    register = model.blocks[index].register_forward_pre_hook
    with hooked(register, action), pytest.raises((Failure, KeyboardInterrupt)):
        loss.backward()
    model.zero_grad()
    for seed in range(2):
        assert_same_tensors(stack_step(model, seed), stack_step(resident, seed))


def test_an_interrupted_backward_may_be_tried_again_on_a_retained_graph(debug):
    resident, model = build_lora(), trae_mem.enable(build_lora(), debug=debug)
    backward_step(resident)
    calls = []

    def interrupt_once(gradient):
        calls.append(gradient)
        if len(calls) == 1:
            raise KeyboardInterrupt

    def watch(module, args, output):
        output.register_hook(interrupt_once)

    with hooked(blocks(model)[3].mlp.register_forward_hook, watch):
        loss = model(**batch()).loss
    with pytest.raises(KeyboardInterrupt):
        loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    assert_same(gradients(model), gradients(resident))


def test_the_state_may_be_read_and_changed_after_an_interrupted_step(debug):
    resident, model = build_lora(), trae_mem.enable(build_lora(), debug=debug)
    with (
        hooked(blocks(model)[3].mlp.register_forward_hook, interrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        backward_step(model)
    assert_same(model.state_dict(), resident.state_dict())
    for each in (resident, model):
        with torch.no_grad():
            blocks(each)[3].mlp.up_proj.weight.mul_(2)
            blocks(each)[3].mlp.down_proj.base_layer.weight.data = torch.ones(32, 64)
    assert_same(state_of(model), state_of(resident))
    assert same_bits(logits(model), logits(resident))
    assert_same_trace(train(model, 2), train(resident, 2))


def test_disable_after_an_interrupted_step(debug):
    model = trae_mem.enable(build_lora(), debug=debug)
    with (
        hooked(blocks(model)[3].mlp.register_forward_hook, interrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        backward_step(model)
    trae_mem.disable(model)
    assert_unharmed(model)


@pytest.mark.parametrize("error", [KeyboardInterrupt, trae_mem.TransferError])
def test_a_block_that_was_not_acquired_is_acquired_when_it_is_tried_again(error, monkeypatch):
    """Called by itself: nothing but the block's own hooks can put things right."""
    model = trae_mem.enable(Stack())
    block, x = model.blocks[0], numbers()

    def end():
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(find_runtime(model).units[0], "show_device", end)
        with pytest.raises(error):
            block(x)
    resting = block.layer.weight.data_ptr()
    used = []

    def note(layer, args):
        used.append(layer.weight.data_ptr())

    with hooked(block.layer.register_forward_pre_hook, note):
        output = block(x)
    assert resting not in used
    assert same_bits(output, Stack().blocks[0](x))


def test_a_pass_begins_with_no_unit_in_use():
    """The first block is acquired anew, though the interrupted pass ended in it."""
    model = trae_mem.enable(build_lora())
    with (
        hooked(blocks(model)[0].mlp.register_forward_hook, interrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        logits(model)
    before = trae_mem.status(model).acquires
    logits(model)
    assert trae_mem.status(model).acquires == before + UNITS


@pytest.mark.parametrize("moment", ["show_device", "show_host", "keep_writes", "accept_changes"])
def test_an_interrupt_inside_of_the_runtime(moment, monkeypatch, debug):
    """Ctrl-C may arrive anywhere; at each of these moments a unit is half moved."""
    model = trae_mem.enable(build_lora(), debug=debug)
    unit = find_runtime(model).units[0]
    original = getattr(unit, moment)
    for factor in (2, 0.5):  # the weights are what they were, and count as changed
        with torch.no_grad():
            blocks(model)[0].mlp.up_proj.weight.mul_(factor)

    def then_interrupt():
        original()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(unit, moment, then_interrupt)
        with pytest.raises(KeyboardInterrupt):
            backward_step(model)
    assert_still_streams(model, getattr(model, "checkpointing", "none"))
