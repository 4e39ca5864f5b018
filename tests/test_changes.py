"""Weights that change between steps: the next use sees them, and no stale slot is ever read.

The models here have more slots than the units that a pass leaves in them, so that most units are
still on the device when their weights change at rest.
"""

from __future__ import annotations

import pytest
import torch
from models import (
    UNITS,
    Stack,
    add_lora,
    assert_same,
    assert_same_tensors,
    assert_same_trace,
    backward_step,
    blocks,
    build,
    build_lora,
    logits,
    named_tensors,
    same_bits,
    stack_step,
    state_of,
    train,
)
from safetensors.torch import load_file
from torch import nn

import trae_mem


@pytest.fixture(params=["ram", "file"])
def source(request, checkpoints):
    """Where the Llama's weights rest."""
    return str(checkpoints["llama"]) if request.param == "file" else "ram"


@pytest.fixture(params=[4, UNITS])
def pair(request, source):
    """The resident model, and the one that streams; both have run a step already."""
    resident = build_lora()
    model = trae_mem.enable(build_lora(), source=source, slots=request.param)
    for each in (resident, model):
        backward_step(each)
        each.zero_grad()
    return resident, model


def assert_used(pair) -> None:
    """Both show the same weights and compute the same with them."""
    resident, model = pair
    assert_same(state_of(model), state_of(resident), "weights")
    assert same_bits(logits(model), logits(resident))
    assert_same_trace(train(model, 1), train(resident, 1))
    assert_same(state_of(model), state_of(resident), "weights")


def weight(model: nn.Module, index: int) -> nn.Parameter:
    return blocks(model)[index].mlp.up_proj.weight


@pytest.mark.parametrize("index", [0, UNITS - 1])
def test_an_in_place_change(pair, index):
    for model in pair:
        with torch.no_grad():
            weight(model, index).mul_(2)
    assert_used(pair)


def test_other_memory(pair):
    """Two assignments in a row: the first one's memory goes before it was ever loaded."""
    for model in pair:
        for index in range(UNITS):
            weight(model, index).data = weight(model, index).data * 1.5
            weight(model, index).data = weight(model, index).data - 0.1
    assert_used(pair)


def test_other_memory_step_by_step(pair):
    resident, model = pair
    for step in range(3):
        for each in pair:
            weight(each, 2).data = weight(each, 2).data * (1.1 + step)
        assert same_bits(logits(model), logits(resident))


def test_other_memory_of_other_strides(pair):
    for model in pair:
        data = weight(model, 4).data
        weight(model, 4).data = (data + 1).t().contiguous().t()
    assert_used(pair)


def test_a_parameter_that_is_replaced(pair):
    for model in pair:
        layer = blocks(model)[1].mlp.up_proj
        layer.weight = nn.Parameter(layer.weight.data * 3, requires_grad=False)
    assert_used(pair)


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(pair, assign):
    state = {name: tensor + 0.01 for name, tensor in state_of(pair[0]).items()}
    for model in pair:
        copies = {name: state[name].clone() for name in model.state_dict()}
        model.load_state_dict(copies, assign=assign)
    assert_used(pair)


def test_a_write_through_data_is_seen_after_refresh(pair):
    for model in pair:
        for index in range(UNITS):
            weight(model, index).data.mul_(2)
    trae_mem.refresh(pair[1])
    assert_used(pair)


def test_a_change_between_forward_and_backward_is_an_error_as_without_streaming(source):
    errors = []
    for streams in (False, True):
        model = build_lora()
        if streams:
            trae_mem.enable(model, source=source)
        loss = logits_with_graph(model).square().mean()
        with torch.no_grad():
            weight(model, 3).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            loss.backward()
        errors.append(caught.value)
        model.zero_grad()
    assert_same_trace(train(model, 2), train(changed_resident(), 2))


def logits_with_graph(model):
    return model(input_ids=torch.arange(8)[None]).logits


def changed_resident():
    model = build_lora()
    with torch.no_grad():
        weight(model, 3).mul_(2)
    return model


@pytest.mark.parametrize("change", ["in place", "other memory", "through data"])
def test_a_weight_that_blocks_share(change):
    """Each block has a place of its own for it."""

    def tied() -> Stack:
        stack = Stack()
        for block in stack.blocks[1:]:
            block.layer.weight = stack.blocks[0].layer.weight
        return stack

    resident, model = tied(), trae_mem.enable(tied(), slots=UNITS)
    for step in range(2):
        for each in (resident, model):
            shared = each.blocks[0].layer.weight
            if change == "in place":
                with torch.no_grad():
                    shared.mul_(1.5)
            elif change == "other memory":
                shared.data = shared.data * 1.5
            else:
                shared.data.mul_(1.5)
                if each is model:
                    trae_mem.refresh(each)
        assert_same_tensors(stack_step(model, step), stack_step(resident, step))


def test_no_load_is_in_flight_when_the_memory_that_it_reads_goes():
    """A load ahead of the change may still be reading the memory that was there before."""
    model = trae_mem.enable(build_lora(), source="ram")
    logits(model)
    calls = []

    class Listening:
        """Stands before an object and notes which of its methods are called."""

        def __init__(self, target):
            self._target = target

        def __getattr__(self, name):
            calls.append(name)
            return getattr(self._target, name)

    runtime(model).streamer = Listening(runtime(model).streamer)
    runtime(model).store = Listening(runtime(model).store)
    weight(model, 0).data = weight(model, 0).data.clone()
    logits(model)
    assert calls.index("drain") < calls.index("accept") < calls.index("invalidate")


def test_unchanged_units_are_not_loaded_again():
    model = trae_mem.enable(build_lora(), slots=UNITS)
    backward_step(model)
    with torch.no_grad():
        weight(model, 3).mul_(2)
    backward_step(model)
    backward_step(model)
    assert trae_mem.status(model).loads == UNITS + 1


# --- adapters ------------------------------------------------------------------------------------


def merge(model):
    model.merge_adapter()


def merge_safely(model):
    model.merge_adapter(safe_merge=True)


def merge_and_unmerge(model):
    """The weights are not quite the old ones afterwards."""
    model.merge_adapter()
    model.unmerge_adapter()


def merge_again(model):
    """Another weight, though the same adapter counts as merged before and after."""
    model.merge_adapter()
    logits(model)
    model.unmerge_adapter()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-3)
    model.merge_adapter()


def merge_another(model):
    model.merge_adapter()
    logits(model)
    model.unmerge_adapter()
    model.add_adapter("second", model.peft_config["default"])
    set_second_adapter(model)
    model.merge_adapter(adapter_names=["second"])


def set_second_adapter(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".second." in name:
                parameter.fill_(0.1)


MERGES = [merge, merge_safely, merge_and_unmerge, merge_again, merge_another]


@pytest.mark.host_only(
    "PEFT adds an adapter only to a weight that is on the same device: merge after disable"
)
@pytest.mark.parametrize("runs_between", [True, False])
@pytest.mark.parametrize("wrapped", ["before", "after"])
@pytest.mark.parametrize("change", MERGES)
def test_merged_adapters(change, wrapped, runs_between, source):
    resident = build_lora()
    model = build_lora() if wrapped == "before" else build()
    trae_mem.enable(model, source=source)
    logits(model)  # units are in the slots
    if wrapped == "after":
        model = add_lora(model)
    for each in (resident, model):
        if runs_between:
            logits(each)
        change(each)
    assert_same(state_of(model), state_of(resident), "weights")
    assert same_bits(logits(model), logits(resident))
    if change is not merge_and_unmerge:
        for each in (resident, model):
            each.unmerge_adapter()
    assert same_bits(logits(model), logits(resident))
    assert_same_trace(train(model, 1), train(resident, 1))


@pytest.mark.host_only(
    "PEFT adds an adapter only to a weight that is on the same device: merge after disable"
)
@pytest.mark.parametrize("runs_between", [True, False])
@pytest.mark.parametrize("wrapped", ["before", "after"])
@pytest.mark.parametrize("leave", ["merge_and_unload", "unload"])
def test_unwrapped_models(leave, wrapped, runs_between, source):
    resident = build_lora()
    model = build_lora() if wrapped == "before" else build()
    trae_mem.enable(model, source=source)
    logits(model)
    if wrapped == "after":
        model = add_lora(model)
    if runs_between:
        logits(model)
    resident, model = getattr(resident, leave)(), getattr(model, leave)()
    assert_same(state_of(model), state_of(resident), "weights")
    for number in range(2):
        assert same_bits(logits(model, number), logits(resident, number))
    trae_mem.disable(model)
    assert_same(state_of(model), state_of(resident), "weights")
    assert same_bits(logits(model), logits(resident))


def test_several_adapters(source):
    resident, model = build_lora(), build_lora()
    trae_mem.enable(model, source=source)
    for each in (resident, model):
        logits(each)
        each.add_adapter("second", each.peft_config["default"])
        set_second_adapter(each)
        each.set_adapter("second")
    assert_same_trace(train(model, 2), train(resident, 2))
    for each in (resident, model):
        each.set_adapter("default")
    assert_same_trace(train(model, 2), train(resident, 2))
    for each in (resident, model):
        each.delete_adapter("second")
        with each.disable_adapter():
            logits(each)
    assert same_bits(logits(model), logits(resident))


@pytest.mark.host_only(
    "PEFT adds an adapter only to a weight that is on the same device: merge after disable"
)
def test_peft_has_its_own_lists_back_after_disable():
    model = trae_mem.enable(build_lora())
    model.merge_adapter()
    trae_mem.disable(model)
    lists = [m.merged_adapters for m in model.modules() if hasattr(m, "merged_adapters")]
    assert {type(entry) for entry in lists} == {list}
    assert all(entry == ["default"] for entry in lists)


# --- reading and saving --------------------------------------------------------------------------


def test_the_state_may_be_read_at_any_time(source, tmp_path):
    resident, model = build_lora(), trae_mem.enable(build_lora(), source=source)

    def assert_same_state(moment: str) -> None:
        assert_same(model.state_dict(), resident.state_dict(), moment)

    assert_same_state("before the first step")
    losses = [each(input_ids=torch.arange(8)[None]).logits.sum() for each in (resident, model)]
    assert_same_state("after forward")
    for loss in losses:
        loss.backward()
    assert_same_state("after backward")
    logits(model), logits(resident)
    assert_same_state("after evaluation")


def test_the_state_may_be_read_inside_of_a_step():
    """From hooks in forward and in backward, while each unit runs."""
    model = trae_mem.enable(build_lora(), debug="poison")
    expected = {n: t.clone() for n, t in build_lora().state_dict().items()}
    moments = []

    def check(*args):
        assert_same(model.state_dict(), expected)
        moments.append(args[0])

    for block in blocks(model):
        block.register_forward_pre_hook(check)
        block.mlp.register_forward_hook(check)
        block.mlp.register_full_backward_hook(check)
    backward_step(model)
    assert len(moments) == 3 * UNITS


def test_saved_models_equal_resident_ones(source, tmp_path):
    saved = {}
    for streams in (False, True):
        model = build_lora()
        if streams:
            trae_mem.enable(model, source=source)
        train(model, 1)
        folder = tmp_path / str(streams)
        model.save_pretrained(folder / "adapter")
        model.base_model.model.save_pretrained(folder / "base")
        files = [folder / "adapter/adapter_model.safetensors", folder / "base/model.safetensors"]
        saved[streams] = [load_file(file) for file in files]
    for streamed, resident in zip(saved[True], saved[False], strict=True):
        assert_same(streamed, resident)


def test_parameters_stay_the_same_objects_on_the_host(source):
    model = build_lora()
    before = dict(named_tensors(model))
    trae_mem.enable(model, source=source)
    for _ in range(2):
        backward_step(model)
        after = dict(named_tensors(model))
        assert after.keys() == before.keys()
        assert all(after[name] is tensor for name, tensor in before.items())
        windows = {id(t): w for u in runtime(model).units for t, w in u._to_device}
        assert windows
        assert all(
            id(t) not in windows or t.data_ptr() != windows[id(t)].data_ptr()
            for t in after.values()
        )


def runtime(model):
    return trae_mem.runtime.find_runtime(model)
