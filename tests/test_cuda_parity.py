"""Streaming to a GPU gives the bits of the resident model on the CPU, whatever is late.

The simulated GPU runs the CPU's kernels in the order of the streams, delays copies, kernels and
events by random times, and fills what is freed with NaN. A wait too few changes a loss.
"""

from __future__ import annotations

import copy

import pytest
import torch
from models import (
    FAMILIES,
    UNITS,
    Stack,
    assert_same_tensors,
    assert_same_trace,
    build_lora,
    stack_step,
    train,
    use_checkpointing,
)
from test_parity import CHECKPOINTING, SLOTS, STEPS, resident, source_of, streaming

import trae_mem

DELAY_US = 120

pytestmark = pytest.mark.sim(gpu="A10", memory="1GiB", poison=True)

on_the_cpu = resident
streamed = streaming.__wrapped__  # anew each time: what is late differs


@pytest.fixture
def adversary():
    """Sets the seed of the random delays; off again afterwards."""
    from trae_mem.sim import control

    yield lambda seed: control.set_adversary(seed=seed, delay_us=DELAY_US, poison=True)
    control.set_adversary(seed=0, delay_us=0, poison=True)


@pytest.mark.parametrize("debug", [None, "poison"])
@pytest.mark.parametrize("store", ["ram", "file"])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_gradients_and_adapters_are_those_of_the_resident_model(
    family, checkpointing, store, debug, checkpoints
):
    source = source_of(store, family, checkpoints)
    trace, statuses = streamed(family, checkpointing, source=source, debug=debug)
    assert_same_trace(trace, on_the_cpu(family, checkpointing))
    assert statuses[-1].device == "A10"
    assert (statuses[-1].source, statuses[-1].written_back_bytes) == (store, 0)
    assert (statuses[-1].streamed_units, statuses[-1].slots) == (UNITS, SLOTS)
    if debug is None:
        first, more = UNITS + (UNITS - SLOTS), 2 * (UNITS - SLOTS)
        assert [status.loads for status in statuses] == [first + n * more for n in range(STEPS)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_depends_on_when_copies_and_kernels_run(
    family, checkpointing, seed, checkpoints, adversary
):
    adversary(seed)
    for store in ("ram", "file"):
        source = source_of(store, family, checkpoints)
        trace, _ = streamed(family, checkpointing, source=source, debug="poison")
        assert_same_trace(trace, on_the_cpu(family, checkpointing))


@pytest.mark.parametrize("prefetch", [0, 1, 4, 9])
def test_the_number_of_units_loaded_ahead_changes_nothing(prefetch, adversary):
    adversary(prefetch)
    trace, _ = streamed("llama", "none", prefetch=prefetch, debug=None)
    assert_same_trace(trace, on_the_cpu("llama", "none"))


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_each_path_of_the_optimizer(options, adversary):
    adversary(1)
    expected = train(build_lora(), 2, **options)
    model = trae_mem.enable(build_lora(), debug="poison")
    assert_same_trace(train(model, 2, **options), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_autocast(checkpointing, dtype, adversary):
    adversary(2)

    def run(model):
        use_checkpointing(model, checkpointing)
        with torch.autocast("cuda", dtype=dtype):
            return train(model, 2)

    expected = run(build_lora().to("cuda"))
    assert_same_trace(run(trae_mem.enable(build_lora(), debug="poison")), expected)


def test_dropout_repeats_itself_in_the_recomputation(adversary):
    adversary(3)

    def run(enable: bool):
        model = build_lora("gpt2", resid_pdrop=0.3).to("cuda")
        use_checkpointing(model, "non-reentrant")
        if enable:
            trae_mem.enable(model, debug="poison")
        torch.manual_seed(5)
        return train(model, 2)

    assert_same_trace(run(True), run(False))


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_a_model_that_computes_in_a_stream_of_its_own(checkpointing, adversary):
    adversary(4)
    with torch.cuda.stream(torch.cuda.Stream()):
        trace, _ = streamed("llama", checkpointing, debug="poison")
    assert_same_trace(trace, on_the_cpu("llama", checkpointing))


def test_a_model_whose_passes_change_their_stream(adversary):
    adversary(5)
    resident, model = Stack(), trae_mem.enable(Stack(), prefetch=1, debug="poison")
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    for seed in range(6):
        stream = streams[seed % 3]
        stream.wait_stream(streams[seed % 3 - 1])
        with torch.cuda.stream(stream):
            actual = stack_step(model, seed)
        assert_same_tensors(actual, stack_step(resident, seed))


class Halves(torch.nn.Module):
    """Computes its second output on a stream of its own, which is joined before it returns."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(16, 16).requires_grad_(False)
        self.second = torch.nn.Linear(16, 16).requires_grad_(False)
        self.gate = torch.nn.Parameter(torch.randn(16))
        self.side = None

    def forward(self, x):
        if not x.is_cuda:
            return self.first(x) * self.gate, self.second(torch.tanh(x))
        self.side = self.side or torch.cuda.Stream()
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            other = self.second(torch.tanh(x))
        torch.cuda.current_stream().wait_stream(self.side)
        return self.first(x) * self.gate, other


class HalvesStack(Stack):
    def __init__(self):
        super().__init__(Halves)

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = sum(block(x))
        return self.outlet(x)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_block_whose_backward_runs_on_two_streams(prefetch, seed, adversary):
    """Autograd runs each node on its forward's stream: each waits, and is waited for."""
    adversary(seed)
    resident = HalvesStack()
    model = trae_mem.enable(HalvesStack(), prefetch=prefetch, debug="poison")
    for number in range(2):
        assert_same_tensors(stack_step(model, number), stack_step(resident, number))


def test_resident_units_and_slots_side_by_side(adversary):
    adversary(7)
    model = trae_mem.enable(build_lora())
    slot = trae_mem.status(model).unit_bytes + 255
    trae_mem.disable(model)
    trae_mem.enable(model, budget=6 * slot, prefetch=1, debug="poison")
    assert trae_mem.status(model).resident_units == 3
    assert_same_trace(train(model, STEPS), on_the_cpu("llama", "none"))


def test_a_copy_of_the_model_may_train_beside_it(adversary):
    adversary(8)
    first, second = build_lora(), build_lora()
    trae_mem.enable(first)
    trae_mem.enable(second, prefetch=0, debug="poison")
    expected = on_the_cpu("llama", "none")
    assert_same_trace(train(first, STEPS), expected)
    assert_same_trace(train(second, STEPS), copy.deepcopy(expected))
