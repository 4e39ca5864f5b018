"""Packs: which tensors are in them, and where."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import WIDTH, Block, Stack, same_bits
from torch import nn

import trae_mem
from trae_mem.native import load_native
from trae_mem.packing import Pack, plan_pack, tensors_outside, view
from trae_mem.units import Unit, find_units


def pack_of(module: nn.Module, outside: set[int] = frozenset()) -> Pack:
    return plan_pack(Unit("unit", module), set(outside))


def names(pack: Pack) -> list[str]:
    return [packed.name for packed in pack.tensors]


def frozen(*shape: int, dtype=torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)


def test_frozen_parameters_and_buffers_are_packed_and_trainable_ones_not():
    block = Block()
    block.register_buffer("table", torch.zeros(3))
    block.register_buffer("cache", torch.zeros(3), persistent=False)
    block.register_buffer("nothing", None)
    expected = ["unit.scale", "unit.table", "unit.cache", "unit.layer.weight", "unit.layer.bias"]
    assert names(pack_of(block)) == expected


def test_a_tensor_with_two_names_is_packed_once():
    block = Block()
    block.again = block.layer
    block.other = nn.Linear(WIDTH, WIDTH)
    block.other.weight = block.layer.weight
    assert names(pack_of(block)).count("unit.layer.weight") == 1
    assert "unit.other.weight" not in names(pack_of(block))


def test_what_modules_outside_use_too_is_left_to_them():
    stack = Stack()
    stack.outlet.weight = stack.blocks[2].layer.weight
    outside = dict(tensors_outside(stack, find_units(stack)))
    assert list(outside) == ["inlet.weight", "inlet.bias", "outlet.weight", "outlet.bias"]
    pack = pack_of(stack.blocks[2], {id(tensor) for tensor in outside.values()})
    assert "unit.layer.weight" not in names(pack)
    assert "unit.layer.bias" in names(pack)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0),
        torch.zeros(4, 4)[:, ::2],
        torch.zeros(4, 1).expand(4, 3),
        torch.eye(3).to_sparse(),
    ],
    ids=["empty", "with gaps", "expanded", "sparse"],
)
def test_tensors_that_do_not_fill_a_range_of_memory_are_left(tensor):
    module = nn.Module()
    module.register_buffer("tensor", tensor)
    assert names(pack_of(module)) == []


def test_running_statistics_of_batch_norm_are_left():
    assert names(pack_of(nn.BatchNorm1d(3).requires_grad_(False))) == ["unit.weight", "unit.bias"]


shapes = st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=8)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool])


@given(shapes=shapes, data=st.data())
def test_places_are_aligned_and_apart(shapes, data):
    module = nn.Module()
    for number, shape in enumerate(shapes):
        tensor = torch.zeros(shape, dtype=data.draw(dtypes))
        module.register_buffer(f"t{number}", tensor)
    pack = pack_of(module)
    assert len(pack.tensors) == len(shapes)
    end = 0
    for packed in pack.tensors:
        assert packed.offset % 256 == 0
        assert end <= packed.offset < end + 256
        assert packed.bytes == packed.tensor.numel() * packed.tensor.element_size()
        end = packed.offset + packed.bytes
    assert pack.bytes == end


@given(permutation=st.permutations(range(4)), dtype=dtypes, seed=st.integers(0, 99))
def test_a_view_has_the_form_of_its_tensor_in_memory_of_its_own(permutation, dtype, seed):
    numbers = torch.randint(0, 2, (2, 3, 1, 4), generator=torch.Generator().manual_seed(seed))
    module = nn.Module()
    module.register_buffer("first", torch.zeros(3))
    module.register_buffer("tensor", numbers.to(dtype).permute(permutation))
    pack = pack_of(module)
    memory = load_native().RamStore(trae_mem.HostDevice()).add_unit(pack.bytes)
    views = [view(memory, packed.offset, packed) for packed in pack.tensors]
    for shown, packed in zip(views, pack.tensors, strict=True):
        shown.copy_(packed.tensor)
    assert same_bits(views[1], module.tensor)
    assert views[1].stride() == module.tensor.stride()
    assert views[0].untyped_storage().data_ptr() != views[1].untyped_storage().data_ptr()
    assert views[1].untyped_storage().nbytes() == pack.tensors[1].bytes


def test_addresses_on_the_device_are_aligned_as_torch_aligns_them():
    model = trae_mem.enable(Stack())
    for unit in trae_mem.runtime.find_runtime(model).units:
        for _, window in unit._to_device:
            assert window.data_ptr() % 256 == 0
