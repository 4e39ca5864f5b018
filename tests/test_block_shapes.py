"""What blocks take, what they return, and how they are called: streaming must not mind."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from models import (
    Block,
    Stack,
    assert_same_tensors,
    assert_same_training,
    numbers,
    stack_step,
    take_gradients,
)
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

import trae_mem

# Dynamo breaks its graph at our hooks, as it must, and warns of the first call that it meets there.
pytestmark = pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")


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
    model = trae_mem.enable(make(), prefetch=0, debug=debug)
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
    trae_mem.enable(model, prefetch=0, debug=debug)
    if compiled == "after":
        compile_blocks(model)
    assert_close_training(model, model, resident)


def test_compiled_blocks_in_a_wrapper_of_their_own(debug):
    torch._dynamo.reset()
    resident, model = Stack(), Stack()
    model.blocks = nn.ModuleList([torch.compile(b, backend="aot_eager") for b in model.blocks])
    trae_mem.enable(model, prefetch=0, debug=debug)
    assert_close_training(model, model, resident)


def test_a_compiled_model(debug):
    torch._dynamo.reset()
    resident, model = Stack(), trae_mem.enable(Stack(), prefetch=0, debug=debug)
    assert_close_training(torch.compile(model, backend="aot_eager"), model, resident)


def assert_close_training(compiled, model, resident) -> None:
    """A compiler may order operations in another way: the bits need not be the same."""
    for seed in range(2):
        compiled(numbers(seed)).square().mean().backward()
        resident(numbers(seed)).square().mean().backward()
        actual, expected = take_gradients(model), take_gradients(resident)
        assert len(actual) == len(expected)
        for pair in zip(actual.values(), expected.values(), strict=True):
            torch.testing.assert_close(*pair)
    torch._dynamo.reset()


def test_gradients_of_a_second_use_of_the_output(debug):
    """The loss takes a block's output past the blocks behind it."""
    results = []
    for streams in (False, True):
        model = Stack()
        if streams:
            trae_mem.enable(model, prefetch=0, debug=debug)
        x = model.inlet(numbers())
        outputs = []
        for block in model.blocks:
            x = block(x)
            outputs.append(x)
        loss = sum((n + 1) * out.square().mean() for n, out in enumerate(outputs))
        loss.backward()
        results.append([loss.detach(), *take_gradients(model).values()])
    assert_same_tensors(results[1], results[0])
