"""status: what is on the device, and how often compute had to wait."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from models import (
    SLOW_LINK,
    UNITS,
    Stack,
    add_lora,
    backward_step,
    blocks,
    build,
    build_lora,
    logits,
    numbers,
    train,
)

import trae_mem


def test_before_the_first_step():
    model = trae_mem.enable(build_lora())
    status = trae_mem.status(model)
    assert (status.units, status.streamed_units, status.resident_units) == (UNITS, UNITS, 0)
    assert (status.slots, status.prefetch, status.source, status.device) == (4, 2, "ram", "host")
    assert status.bytes_on_device == 4 * -(-status.unit_bytes // 256) * 256
    assert status.total_bytes == UNITS * status.unit_bytes
    assert (status.acquires, status.loads, status.hits, status.stalls) == (0, 0, 0, 0)
    assert status.stall_share == 0


def test_counts_add_up():
    model = trae_mem.enable(build_lora())
    train(model, 3)
    status = trae_mem.status(model)
    assert status.acquires == status.hits + status.stalls == 3 * 2 * UNITS
    assert status.load_bytes == status.loads * status.unit_bytes
    assert status.load_seconds > 0
    assert 0 <= status.stall_share <= 1
    assert status.stall_seconds <= status.elapsed_seconds


def test_stalls_are_counted_when_each_load_is_late():
    """The link is so slow that a load ahead does not help."""
    device = trae_mem.HostDevice(link_bytes_per_second=SLOW_LINK)
    model = trae_mem.enable(build_lora(), prefetch=0, device=device)
    logits(model)
    status = trae_mem.status(model)
    assert (status.stalls, status.hits) == (UNITS, 0)
    assert status.stall_seconds > 0


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_loads_are_begun_ahead_of_their_use(prefetch):
    model = trae_mem.enable(Stack(), prefetch=prefetch)
    model.blocks[2](numbers())
    assert trae_mem.status(model).loads == 1 + prefetch
    model.blocks[3](numbers())
    assert trae_mem.status(model).loads == 2 + prefetch


def test_a_released_slot_is_poisoned_on_demand():
    model = trae_mem.enable(Stack(), prefetch=0, debug="poison")
    runtime = trae_mem.runtime.find_runtime(model)
    model.blocks[2](numbers())
    runtime.streamer.drain()
    for _, window in runtime.units[2]._to_device:
        assert torch.isnan(window).all()


def test_time_is_counted_from_the_first_pass():
    model = trae_mem.enable(build_lora())
    logits(model)
    first = trae_mem.status(model).elapsed_seconds
    second = trae_mem.status(model).elapsed_seconds
    assert 0 < first < second


def test_a_status_does_not_change():
    model = trae_mem.enable(build_lora())
    status = trae_mem.status(model)
    with pytest.raises(dataclasses.FrozenInstanceError):
        status.loads = 3
    backward_step(model)
    assert status.loads == 0
    assert trae_mem.status(model).loads > 0


def test_any_part_of_the_model_and_what_wraps_it_tells():
    model = trae_mem.enable(build())
    wrapped = add_lora(model)
    logits(wrapped)
    statuses = [
        trae_mem.status(part)
        for part in (model, wrapped, model.model, blocks(model), blocks(model)[2])
    ]
    assert {status.acquires for status in statuses} == {UNITS}


def test_the_table():
    model = trae_mem.enable(build_lora(), budget="1GiB")
    backward_step(model)
    text = str(trae_mem.status(model))
    for line in ("7: 0 streamed, 7 stay", "weights rest in", "of 14 uses", "stall share", "0 B"):
        assert line in text
    names = [line.split("  ")[0].rstrip() for line in text.splitlines()]
    assert len(names) == len(set(names)) == 9
