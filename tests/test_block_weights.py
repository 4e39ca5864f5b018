"""What weights blocks have, and what they do with them: streaming must not mind."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from models import (
    UNITS,
    WIDTH,
    Block,
    Stack,
    assert_same_tensors,
    assert_same_training,
    stack_step,
)
from torch import nn

import trae_mem


class TiedInside(Block):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.other.weight = self.layer.weight

    def forward(self, x):
        return super().forward(x) + self.other(x)


def test_a_weight_with_two_names_in_a_block(debug):
    model = trae_mem.enable(Stack(TiedInside))
    assert trae_mem.status(model).unit_bytes == 4 * (WIDTH * WIDTH + 2 * 256 // 4 + WIDTH)
    assert_same_training(lambda: Stack(TiedInside), debug)


def tied_outside():
    stack = Stack()
    stack.inlet.weight = stack.blocks[3].layer.weight
    return stack


def test_a_weight_shared_by_a_block_and_its_surroundings_stays(debug):
    model = assert_same_training(tied_outside, debug)
    assert model.inlet.weight is model.blocks[3].layer.weight


def tied_blocks():
    stack = Stack()
    for block in stack.blocks[1:]:
        block.layer.weight = stack.blocks[0].layer.weight
    return stack


def test_a_weight_shared_by_all_blocks(debug):
    model = assert_same_training(tied_blocks, debug)
    assert all(block.layer.weight is model.blocks[0].layer.weight for block in model.blocks)


def shared_block():
    stack = Stack()
    for index in range(1, UNITS, 2):
        stack.blocks[index] = stack.blocks[0]
    return stack


def test_a_block_that_stands_in_the_list_more_than_once(debug):
    assert_same_training(shared_block, debug)


class Strided(Block):
    """Weights in memory formats of their own."""

    def __init__(self):
        super().__init__()
        weight = self.layer.weight.data
        self.layer.weight = nn.Parameter(weight.t().contiguous().t(), requires_grad=False)
        gaps = torch.randn(WIDTH, 2 * WIDTH)[:, ::2]
        self.gaps = nn.Parameter(gaps, requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 3), requires_grad=False)

    def forward(self, x):
        return F.linear(super().forward(x), self.gaps)


def test_strides_are_kept(debug):
    strides = [t.stride() for t in state_with_strides(Stack(Strided))]
    model = assert_same_training(lambda: Stack(Strided), debug)
    assert [t.stride() for t in state_with_strides(model)] == strides


def state_with_strides(model):
    return [parameter.detach() for parameter in model.parameters()]


class ManyDtypes(Block):
    def __init__(self):
        super().__init__()
        self.brain = nn.Parameter(torch.randn(3).bfloat16(), requires_grad=False)
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("codes", torch.arange(5, dtype=torch.uint8), persistent=False)

    def forward(self, x):
        x = super().forward(x)
        return x + self.brain.sum() * self.flags.sum() / self.count + self.codes.sum()


def test_weights_of_many_dtypes_and_sizes(debug):
    assert_same_training(lambda: Stack(ManyDtypes), debug)


class KeepsWeightOnContext(torch.autograd.Function):
    """As bitsandbytes does: saved-tensor hooks and version checks never see the weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight.t()
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.weight.t(), None


class WithFunction(Block):
    def forward(self, x):
        return super().forward(x) + KeepsWeightOnContext.apply(x, self.layer.weight)


def test_functions_that_keep_weights_as_attributes(debug):
    assert_same_training(lambda: Stack(WithFunction), debug)


# --- buffers that forward writes -----------------------------------------------------------------


class Averages(Block):
    """Keeps statistics of its input, written in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.average.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
            self.count += 1
        return super().forward(x) - self.average / self.count


class Normalizes(Block):
    """The same, but by a kernel that leaves no trace of it."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH).requires_grad_(False)

    def forward(self, x):
        return super().forward(self.norm(x.flatten(0, 1)).view_as(x))


@pytest.mark.parametrize("block", [Averages, Normalizes])
def test_statistics_that_forward_writes_are_kept(block, debug):
    assert_same_training(lambda: Stack(block), debug)


def test_statistics_are_written_back_to_where_they_rest(debug):
    model = trae_mem.enable(Stack(Averages), debug=debug)
    stack_step(model)
    assert trae_mem.status(model).written_back_bytes == UNITS * (4 * WIDTH + 8)
    rests = trae_mem.runtime.find_runtime(model).store.hosts
    for block, hosts in zip(model.blocks, rests, strict=True):
        assert block.average.data_ptr() in [host.data_ptr() for host in hosts]
        assert block.count.item() == 1


@pytest.mark.parametrize("block", [Averages, Normalizes])
def test_statistics_that_are_only_read_are_not_written_back(block, debug):
    resident, model = Stack(block), trae_mem.enable(Stack(block), debug=debug)
    for each in (resident, model):
        stack_step(each)
        each.eval()
    written = trae_mem.status(model).written_back_bytes
    assert_same_tensors(stack_step(model), stack_step(resident))
    assert trae_mem.status(model).written_back_bytes == written


def shared_average():
    stack = Stack(Averages)
    for block in stack.blocks[1:]:
        block.average, block.count = stack.blocks[0].average, stack.blocks[0].count
    return stack


def average_that_the_last_block_writes():
    stack = shared_average()
    stack.blocks[:-1].eval()
    stack.blocks[0].count.add_(1)
    return stack


@pytest.mark.parametrize("make", [shared_average, average_that_the_last_block_writes])
def test_statistics_that_blocks_share(make, debug):
    assert_same_training(make, debug)


class ReplacesBuffer(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x):
        self.average = self.average * 0.9 + x.detach().mean((0, 1)) * 0.1
        return super().forward(x) - self.average


def test_buffers_that_forward_replaces(debug):
    assert_same_training(lambda: Stack(ReplacesBuffer), debug)
