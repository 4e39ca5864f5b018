"""Blocks that torch.compile compiled: one graph for all of them, no break at our hooks."""

from __future__ import annotations

import pytest
import torch
from models import (
    Stack,
    add_lora,
    assert_same_tensors,
    assert_same_trace,
    blocks,
    build,
    hook_count,
    stack_step,
    train,
)
from torch import nn
from torch._dynamo.utils import counters

import trae_mem

BACKEND = "aot_eager"


def compile_in_place(parent: nn.ModuleList) -> None:
    for block in parent:
        block.compile(backend=BACKEND, fullgraph=True)


def compile_by_wrapping(parent: nn.ModuleList) -> None:
    for index, block in enumerate(parent):
        parent[index] = torch.compile(block, backend=BACKEND, fullgraph=True)


def compile_the_forward(parent: nn.ModuleList) -> None:
    for block in parent:
        block.forward = torch.compile(block.forward, backend=BACKEND, fullgraph=True)


WAYS = [compile_in_place, compile_by_wrapping, compile_the_forward]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def llama() -> nn.Module:
    """Without a cache, whose layers differ from each other, so that one graph fits all blocks."""
    return add_lora(build("llama", use_cache=False))


def compiled_llama(way, order: str) -> nn.Module:
    model = llama()
    if order == "compiled before":
        way(blocks(model))
    trae_mem.enable(model)
    if order == "compiled after":
        way(blocks(model))
    return model


def graphs() -> int:
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("order", ["compiled before", "compiled after"])
@pytest.mark.parametrize("way", WAYS)
def test_compiled_blocks_stream_in_one_graph_with_the_same_bits(way, order):
    resident = llama()
    way(blocks(resident))
    expected, expected_graphs = train(resident, 3), graphs()
    torch._dynamo.reset()
    counters.clear()
    model = compiled_llama(way, order)
    assert_same_trace(train(model, 3), expected)
    # The first block's input needs no gradient, the others' does: two graphs for all blocks.
    assert graphs() == expected_graphs == 2
    assert trae_mem.status(model).loads > 0


@pytest.mark.parametrize("way", WAYS)
def test_checkpointed_compiled_blocks_stream_with_the_same_bits(way):
    def checkpointed(model: nn.Module) -> nn.Module:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
        return model

    resident = checkpointed(llama())
    way(blocks(resident))
    expected = train(resident, 2)
    assert_same_trace(train(checkpointed(compiled_llama(way, "compiled before")), 2), expected)


@pytest.mark.parametrize("order", ["compiled before", "compiled after"])
@pytest.mark.parametrize("way", WAYS)
def test_disable_leaves_the_compiled_blocks_as_they_were(way, order):
    plain = llama()
    way(blocks(plain))
    count = hook_count(plain)
    expected = train(plain, 2)
    model = compiled_llama(way, order)
    train(model, 1)
    trae_mem.disable(model)
    assert hook_count(model) == count
    assert all(type(b._compiled_call_impl).__name__ != "_EnclosedCall" for b in blocks(model))
    fresh = compiled_llama(way, order)
    trae_mem.disable(fresh)
    assert_same_trace(train(fresh, 2), expected)


def test_a_block_that_is_compiled_again_still_streams():
    resident, model = Stack(), trae_mem.enable(Stack(), prefetch=0, debug="poison")
    for seed in range(3):
        assert_same_tensors(stack_step(model, seed), stack_step(resident, seed))
        compile_in_place(model.blocks)


def test_an_exception_in_a_compiled_block_leaves_everything_usable():
    class Fails(nn.Module):
        def forward(self, x):
            raise RuntimeError("the block's own failure")

    resident, model = Stack(), Stack()
    compile_in_place(model.blocks)
    trae_mem.enable(model, prefetch=0, debug="poison")
    good = model.outlet
    model.outlet = Fails()
    with pytest.raises(RuntimeError, match="the block's own failure"):
        stack_step(model)
    model.outlet = good
    with pytest.raises(RuntimeError):
        model(torch.zeros(2, 3))  # of the wrong width: fails in a compiled block or before it
    assert_same_tensors(stack_step(model), stack_step(resident))
