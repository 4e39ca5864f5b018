"""Training with streaming gives the same bits as training without it."""

from __future__ import annotations

import functools

import pytest
from models import (
    FAMILIES,
    UNITS,
    Trace,
    assert_same_trace,
    build_lora,
    train,
    use_checkpointing,
)

import trae_mem

CHECKPOINTING = ("none", "non-reentrant", "reentrant")
STEPS, SLOTS = 3, 4


@functools.cache
def resident(family: str, checkpointing: str) -> Trace:
    model = build_lora(family)
    use_checkpointing(model, checkpointing)
    return train(model, STEPS)


@functools.cache
def streaming(family: str, checkpointing: str, **options) -> tuple[Trace, list[trae_mem.Status]]:
    """The same training, and the status after each step."""
    model = build_lora(family)
    use_checkpointing(model, checkpointing)
    trae_mem.enable(model, **options)
    statuses = []
    trace = train(model, STEPS, after_step=lambda step: statuses.append(trae_mem.status(model)))
    return trace, statuses


def source_of(store: str, family: str, checkpoints) -> str:
    return str(checkpoints[family]) if store == "file" else "ram"


@pytest.mark.parametrize("debug", [None, "poison"])
@pytest.mark.parametrize("store", ["ram", "file"])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_gradients_and_adapters_are_those_of_the_resident_model(
    family, checkpointing, store, debug, checkpoints
):
    source = source_of(store, family, checkpoints)
    trace, statuses = streaming(family, checkpointing, source=source, debug=debug)
    assert_same_trace(trace, resident(family, checkpointing))
    assert (statuses[-1].source, statuses[-1].written_back_bytes) == (store, 0)
    assert (statuses[-1].streamed_units, statuses[-1].slots) == (UNITS, SLOTS)


@pytest.mark.parametrize("store", ["ram", "file"])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_micro_step_loads_what_the_slots_did_not_keep_and_nothing_else(
    family, checkpointing, store, checkpoints
):
    source = source_of(store, family, checkpoints)
    _, statuses = streaming(family, checkpointing, source=source, debug=None)
    first = UNITS + (UNITS - SLOTS)  # nothing is there yet
    expected = 2 * (UNITS - SLOTS)
    assert [status.loads for status in statuses] == [first + n * expected for n in range(STEPS)]
    # Once forward and once backward: a unit stays current from its recomputation to its end.
    assert [status.acquires for status in statuses] == [2 * UNITS * (n + 1) for n in range(STEPS)]
    assert statuses[-1].written_back_bytes == 0


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_the_number_of_units_loaded_ahead_changes_nothing(prefetch):
    trace, statuses = streaming("llama", "none", prefetch=prefetch)
    assert_same_trace(trace, resident("llama", "none"))
    slots = prefetch + 2
    assert statuses[-1].slots == slots
    assert statuses[-1].loads == UNITS + (UNITS - slots) + (STEPS - 1) * 2 * (UNITS - slots)


@pytest.mark.parametrize("slots", [UNITS, UNITS + 3])
def test_with_a_slot_for_each_unit_each_is_loaded_once(slots):
    trace, statuses = streaming("llama", "none", slots=slots)
    assert_same_trace(trace, resident("llama", "none"))
    assert (statuses[-1].slots, statuses[-1].loads) == (UNITS, UNITS)


@pytest.mark.parametrize("family", FAMILIES)
def test_late_copies_change_nothing(family):
    device = trae_mem.HostDevice(random_delay_us=300, seed=3)
    trace, _ = streaming(family, "none", device=device)
    assert_same_trace(trace, resident(family, "none"))
