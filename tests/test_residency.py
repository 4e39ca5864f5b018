"""The budget: as many units as fit stay on the device."""

from __future__ import annotations

import pytest
import torch
from models import (
    UNITS,
    WIDTH,
    Block,
    Stack,
    assert_same_tensors,
    assert_same_trace,
    build_lora,
    stack_step,
    train,
)
from torch import nn

import trae_mem

ALIGNMENT = 256


def slot_bytes(model: nn.Module) -> int:
    trae_mem.enable(model)
    size = trae_mem.status(model).unit_bytes
    trae_mem.disable(model)
    return -(-size // ALIGNMENT) * ALIGNMENT


class Wide(Block):
    """A block that holds eight times the bytes of another."""

    def __init__(self):
        super().__init__()
        self.more = nn.Parameter(torch.randn(8, WIDTH, WIDTH), requires_grad=False)

    def forward(self, x):
        return super().forward(x) + torch.tanh(x @ self.more[3])


def build_uneven(*wide: int) -> Stack:
    """A stack in which these blocks are the large ones."""
    numbers = iter(range(UNITS))
    return Stack(lambda: Wide() if next(numbers) in wide else Block())


@pytest.mark.parametrize(
    ("slots_of_budget", "resident"), [(4, 0), (5, 1), (6, 2), (7, UNITS), (100, UNITS)]
)
def test_units_that_fit_beside_the_slots_stay(slots_of_budget, resident):
    model = build_lora()
    size = slot_bytes(model)
    trae_mem.enable(model, budget=slots_of_budget * size)
    status = trae_mem.status(model)
    assert (status.resident_units, status.streamed_units) == (resident, UNITS - resident)
    assert status.bytes_on_device <= slots_of_budget * size
    assert status.bytes_on_device == (resident + status.slots) * size


def test_a_resident_unit_is_loaded_once():
    model = build_lora()
    trae_mem.enable(model, budget=(3 + 2) * slot_bytes(model), prefetch=0)
    assert trae_mem.status(model).resident_units == 3
    train(model, 3)
    streamed = UNITS - 3
    expected = 3 + streamed + (streamed - 2) + 2 * 2 * (streamed - 2)
    assert trae_mem.status(model).loads == expected


@pytest.mark.parametrize("budget", [10 * 2**30, "10GiB", "10 gb", "0.5 GiB", 1.0])
def test_forms_of_a_budget(budget):
    model = trae_mem.enable(build_lora(), budget=budget)
    assert trae_mem.status(model).resident_units == UNITS
    assert_same_trace(train(model, 2), train(build_lora(), 2))


def test_a_fraction_is_one_of_the_device_s_memory():
    model = build_lora()
    size = slot_bytes(model)
    device = trae_mem.HostDevice(memory_bytes=64 << 20)
    trae_mem.enable(model, device=device, budget=5.5 * size / (64 << 20))
    assert trae_mem.status(model).resident_units == 1


@pytest.mark.parametrize("prefetch", [0, 2, 4])
@pytest.mark.parametrize("wide", [(), (0,), (3,), (6,), (1, 4), range(UNITS)])
def test_the_minimum_of_a_budget_is_the_minimum(wide, prefetch):
    """That budget does, a byte less does not."""
    with pytest.raises(trae_mem.BudgetError) as caught:
        trae_mem.enable(build_uneven(*wide), budget=0, prefetch=prefetch)
    minimum = caught.value.minimum
    assert str(minimum) in str(caught.value)
    model = trae_mem.enable(build_uneven(*wide), budget=minimum, prefetch=prefetch)
    assert trae_mem.status(model).bytes_on_device == minimum
    with pytest.raises(trae_mem.BudgetError) as caught:
        trae_mem.enable(build_uneven(*wide), budget=minimum - 1, prefetch=prefetch)
    assert caught.value.minimum == minimum


def test_the_message_names_a_setting_that_fits():
    model = build_lora()
    size = slot_bytes(model)
    with pytest.raises(trae_mem.BudgetError, match="prefetch=0"):
        trae_mem.enable(model, budget=3 * size)
    trae_mem.enable(model, budget=3 * size, prefetch=0)
    trae_mem.disable(model)
    with pytest.raises(trae_mem.BudgetError) as caught:
        trae_mem.enable(model, budget=size, prefetch=0)
    assert "prefetch=0" not in str(caught.value)


@pytest.mark.parametrize("wide", [(0,), (6,), (2, 3)])
def test_units_of_different_sizes(wide, debug):
    resident, model = build_uneven(*wide), build_uneven(*wide)
    trae_mem.enable(model, prefetch=1, debug=debug)
    for seed in range(2):
        assert_same_tensors(stack_step(model, seed), stack_step(resident, seed))


@pytest.mark.parametrize("budget", [0.0, -0.5, 1.5, float("nan"), -1, "ten", "10 XB", True, [1]])
def test_budgets_that_make_no_sense(budget):
    model = build_lora()
    with pytest.raises((trae_mem.ConfigError, trae_mem.BudgetError)):
        trae_mem.enable(model, budget=budget)
    with pytest.raises(trae_mem.ConfigError):
        trae_mem.status(model)
