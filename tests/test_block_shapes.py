"""What blocks take, return and do to their weights: streaming must not mind."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from models import (
    UNITS,
    WIDTH,
    Block,
    Stack,
    assert_same,
    assert_same_tensors,
    numbers,
    stack_step,
    state_of,
    take_gradients,
)
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

import trae_mem


def assert_same_training(make, debug, steps: int = 3, **options) -> nn.Module:
    """Trains ``make()`` with and without streaming; returns the one that streams."""
    resident, model = make(), trae_mem.enable(make(), prefetch=1, debug=debug, **options)
    for seed in range(steps):
        assert_same_tensors(stack_step(model, seed), stack_step(resident, seed))
    trae_mem.disable(model)
    assert_same(state_of(model), state_of(resident))
    return model


# --- outputs -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    name: str = "block"


WRAPPINGS = {
    "tuple": (lambda x: (x, None, 3), lambda out: out[0]),
    "list": (lambda x: ["a", [x]], lambda out: out[1][0]),
    "dict": (lambda x: {"hidden": {"x": x}}, lambda out: out["hidden"]["x"]),
    "ModelOutput": (lambda x: BaseModelOutput(last_hidden_state=x), lambda out: out[0]),
    "dataclass": (Output, lambda out: out.hidden),
    "dataclass in a tuple": (lambda x: (1, Output(x)), lambda out: out[1].hidden),
}


@pytest.mark.parametrize("form", WRAPPINGS)
def test_outputs_of_any_form(form, debug):
    wrap, unwrap = WRAPPINGS[form]

    class Wrapping(Block):
        def forward(self, x):
            return wrap(super().forward(x))

    class WrappingStack(Stack):
        def forward(self, x):
            x = self.inlet(x)
            for block in self.blocks:
                x = unwrap(block(x))
            return self.outlet(x)

    assert_same_training(lambda: WrappingStack(Wrapping), debug)


class EndsInLayer(Block):
    """Its output is a view of what the layer computed, and its last operation has a weight."""

    def forward(self, x):
        return self.layer(torch.tanh(x * self.scale) * self.gate)


class EndsInSlice(Block):
    def forward(self, x):
        return F.pad(super().forward(x), (1, 1))[..., 1:-1]


class ChangingStack(Stack):
    """Changes each block's output in place."""

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            before = x
            x = block(x)
            x += before
            x.mul_(0.7)
        return self.outlet(x)


@pytest.mark.parametrize("block", [Block, EndsInLayer, EndsInSlice])
def test_outputs_that_are_changed_in_place(block, debug):
    assert_same_training(lambda: ChangingStack(block), debug)


class ChangesInput(Block):
    """Returns nothing: its result is its input, changed in place."""

    def forward(self, x):
        x.add_(super().forward(x))


class InPlaceStack(Stack):
    def forward(self, x):
        x = self.inlet(x).clone()
        for block in self.blocks:
            block(x)
        return self.outlet(x)


class InPlaceKeywordStack(Stack):
    def forward(self, x):
        x = self.inlet(x).clone()
        for block in self.blocks:
            block(x=x)
        return self.outlet(x)


@pytest.mark.parametrize("stack", [InPlaceStack, InPlaceKeywordStack])
def test_blocks_that_change_their_input_in_place(stack, debug):
    assert_same_training(lambda: stack(ChangesInput), debug)


class Skips(Block):
    """Every second call returns its input as it is."""

    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return x if self.calls % 2 else super().forward(x)


def test_blocks_that_return_their_input(debug):
    """The node that made it belongs to the block before."""

    def make():
        Skips.calls = 0
        return Stack(Skips)

    resident = make()
    expected = [stack_step(resident, seed) for seed in range(3)]
    model = trae_mem.enable(make(), prefetch=1, debug=debug)
    for seed in range(3):
        assert_same_tensors(stack_step(model, seed), expected[seed])


class PassesOn(Block):
    """Hands its input through beside its output."""

    def forward(self, pair):
        x, _ = pair
        return super().forward(x), x


class PairStack(Stack):
    def forward(self, x):
        pair = self.inlet(x), None
        for block in self.blocks:
            pair = block(pair)
        return self.outlet(pair[0] + pair[1])


def test_blocks_that_hand_their_input_through(debug):
    assert_same_training(lambda: PairStack(PassesOn), debug)


class WithSideLoss(Block):
    """Leaves a tensor behind that the loss uses too, as routers of experts do."""

    def forward(self, x):
        self.side = self.layer(x * self.gate).sigmoid()
        return super().forward(x)


class SideLossStack(Stack):
    def forward(self, x):
        out = super().forward(x)
        return out + sum(block.side.mean() for block in self.blocks)


def test_tensors_that_are_handed_out_on_the_side(debug):
    assert_same_training(lambda: SideLossStack(WithSideLoss), debug)


# --- weights -------------------------------------------------------------------------------------


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


# --- compiled ------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", ["before", "after"])
def test_compiled_blocks(compiled, debug):
    def compile_blocks(stack):
        for block in stack.blocks:
            block.compile(backend="aot_eager")
        return stack

    torch._dynamo.reset()
    resident, model = Stack(), Stack()
    if compiled == "before":
        compile_blocks(model)
    trae_mem.enable(model, prefetch=1, debug=debug)
    if compiled == "after":
        compile_blocks(model)
    for seed in range(2):
        expected = stack_step(resident, seed)
        for actual, wanted in zip(stack_step(model, seed), expected, strict=True):
            torch.testing.assert_close(actual, wanted)
    torch._dynamo.reset()


def test_compiled_blocks_in_a_wrapper_of_their_own(debug):
    torch._dynamo.reset()
    resident, model = Stack(), Stack()
    model.blocks = nn.ModuleList([torch.compile(b, backend="aot_eager") for b in model.blocks])
    trae_mem.enable(model, prefetch=1, debug=debug)
    for seed in range(2):
        expected = stack_step(resident, seed)
        for actual, wanted in zip(stack_step(model, seed), expected, strict=True):
            torch.testing.assert_close(actual, wanted)
    torch._dynamo.reset()


def test_gradients_of_a_second_use_of_the_output(debug):
    """The loss takes a block's output past the blocks behind it."""
    results = []
    for streams in (False, True):
        model = Stack()
        if streams:
            trae_mem.enable(model, prefetch=1, debug=debug)
        x = model.inlet(numbers())
        outputs = []
        for block in model.blocks:
            x = block(x)
            outputs.append(x)
        loss = sum((n + 1) * out.square().mean() for n, out in enumerate(outputs))
        loss.backward()
        results.append([loss.detach(), *take_gradients(model).values()])
    assert_same_tensors(results[1], results[0])
