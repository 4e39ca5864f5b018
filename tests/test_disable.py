"""disable: the model is exactly what it was before it was enabled."""

from __future__ import annotations

import gc

import pytest
import torch
from models import (
    UNITS,
    Stack,
    assert_same,
    assert_same_tensors,
    assert_same_trace,
    backward_step,
    blocks,
    build_lora,
    gradients,
    hook_count,
    logits,
    named_tensors,
    numbers,
    same_bits,
    stack_step,
    state_of,
    take_gradients,
    train,
    use_checkpointing,
)
from torch import nn

import trae_mem
from trae_mem.runtime import find_runtime


@pytest.fixture(params=["ram", "file"])
def source(request, checkpoints):
    return str(checkpoints["llama"]) if request.param == "file" else "ram"


def form_of(model: nn.Module):
    """Everything of a tensor but its address."""
    return {
        name: (id(t), type(t), t.dtype, t.shape, t.stride(), t.requires_grad, t.device, t.is_leaf)
        for name, t in named_tensors(model)
    }


def test_everything_is_as_it_was(source):
    resident, model = build_lora(), build_lora()
    form, hooks, modes = form_of(model), hook_count(model), [m.training for m in model.modules()]
    attributes = [set(module.__dict__) for module in model.modules()]
    assert trae_mem.enable(model, source=source) is model
    assert hook_count(model) == hooks + 2 * UNITS + 1
    assert_same_trace(train(model, 2), train(resident, 2))
    logits(model)
    model.train(modes[0])
    model.zero_grad()
    assert trae_mem.disable(model) is model
    assert hook_count(model) == hooks
    assert form_of(model) == form
    assert [set(module.__dict__) for module in model.modules()] == attributes
    assert [m.training for m in model.modules()] == modes
    assert_same(state_of(model), state_of(resident))
    assert find_runtime(model) is None
    assert_same_trace(train(model, 2), train(resident, 2))


def test_no_hook_stays_with_torch():
    def registered() -> list[dict]:
        module = torch.nn.modules.module
        kinds = ("module", "parameter")
        return [dict(getattr(module, f"_global_{kind}_registration_hooks")) for kind in kinds]

    before = registered()
    model = trae_mem.enable(build_lora())
    assert registered() != before
    trae_mem.disable(model)
    assert registered() == before


@pytest.mark.host_only("weights rest on the host while the model computes on the GPU")
def test_strides_of_other_orders_and_no_order():
    model = Stack()
    for block in model.blocks:
        block.layer.weight.data = block.layer.weight.data.t()
        block.scale.data = torch.randn(16, 2)[:, 0]
    form, state = form_of(model), state_of(model)
    with trae_mem.offloaded(model):
        stack_step(model)
        assert form_of(model) == form
    assert form_of(model) == form
    assert_same(state_of(model), state)


@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant", "reentrant"])
def test_a_backward_that_is_still_to_come(checkpointing, debug):
    """The graph holds views of windows, which must show the right bytes as long as it lives."""
    resident, model = build_lora(), build_lora()
    for each in (resident, model):
        use_checkpointing(each, checkpointing)
        each.train()
    backward_step(resident)
    trae_mem.enable(model, debug=debug)
    loss = model(**batch()).loss
    logits(model, 5)  # other units in the slots
    trae_mem.disable(model)
    loss.backward()
    assert_same(gradients(model), gradients(resident))
    assert_same(state_of(model), state_of(resident))


def batch():
    import models

    return models.batch(0)


def test_a_backward_that_is_still_to_come_when_the_model_streams_anew(debug):
    resident, model = build_lora(), trae_mem.enable(build_lora(), debug=debug)
    backward_step(resident)
    loss = model(**batch()).loss
    trae_mem.disable(model)
    trae_mem.enable(model, debug=debug, slots=UNITS)
    logits(model)
    loss.backward()
    assert_same(take_gradients(model), take_gradients(resident))
    assert_same_trace(train(model, 2), train(resident, 2))


def test_a_graph_outlives_the_model_and_its_streaming():
    resident, model = Stack(), trae_mem.enable(Stack(), prefetch=0)
    x, y = numbers().requires_grad_(), numbers().requires_grad_()
    loss = model(x).square().mean()
    trae_mem.disable(model)
    del model
    gc.collect()
    loss.backward()
    resident(y).square().mean().backward()
    assert same_bits(x.grad, y.grad)


def test_a_graph_outlives_a_model_that_still_streams():
    resident, model = Stack(), trae_mem.enable(Stack(), prefetch=0)
    x, y = numbers().requires_grad_(), numbers().requires_grad_()
    loss = model(x).square().mean()
    del model
    gc.collect()
    loss.backward()
    resident(y).square().mean().backward()
    assert same_bits(x.grad, y.grad)


def test_enabled_and_disabled_again_and_again(source):
    resident, model = build_lora(), build_lora()
    for number in range(3):
        with trae_mem.offloaded(model, source=source, prefetch=number) as streaming:
            assert streaming is model
            assert trae_mem.status(model).prefetch == number
            assert same_bits(logits(model, number), logits(resident, number))
        assert same_bits(logits(model, number), logits(resident, number))
    assert_same(state_of(model), state_of(resident))


def test_an_error_inside_of_offloaded_ends_it():
    model = build_lora()

    def stream_and_fail():
        with trae_mem.offloaded(model):
            assert trae_mem.status(model).units == UNITS
            raise KeyError

    with pytest.raises(KeyError):
        stream_and_fail()
    assert find_runtime(model) is None


@pytest.mark.host_only(
    "PEFT adds an adapter only to a weight that is on the same device: merge after disable"
)
def test_what_was_changed_while_it_streamed_stays_changed(source):
    resident, model = build_lora(), trae_mem.enable(build_lora(), source=source)
    for each in (resident, model):
        logits(each)
        layers = blocks(each)
        with torch.no_grad():
            layers[0].mlp.up_proj.weight.mul_(2)
        layers[1].mlp.up_proj.weight.data = layers[1].mlp.up_proj.weight.data + 1
        layers[2].mlp.up_proj.weight.data.add_(1)
        each.merge_adapter()
    trae_mem.disable(model)
    assert_same(state_of(model), state_of(resident))
    assert same_bits(logits(model), logits(resident))


def test_disabled_through_any_part_of_the_model():
    for part in (lambda m: m, lambda m: m.base_model.model.model, lambda m: blocks(m)[3]):
        model = trae_mem.enable(build_lora())
        trae_mem.disable(part(model))
        assert find_runtime(model) is None
        assert hook_count(model) == hook_count(build_lora())


def test_parts_that_stream_on_their_own():
    class Twin(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Stack(seed=1), Stack(seed=2)

        def forward(self, x):
            return self.second(self.first(x))

    resident, model = Twin(), Twin()
    trae_mem.enable(model.first, prefetch=0, debug="poison")
    trae_mem.enable(model.second, debug="poison")
    for seed in range(2):
        assert_same_tensors(stack_step(model, seed), stack_step(resident, seed))
    trae_mem.disable(model.first)
    assert_same_tensors(stack_step(model, 3), stack_step(resident, 3))
    assert trae_mem.status(model.second).slots == 4
