"""How many slots there are, and which units stay on the device beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trae_mem.errors import BudgetError, ConfigError
from trae_mem.native import load_native
from trae_mem.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from trae_mem import _native

__all__ = ["budget_bytes", "choose_resident", "slot_count"]


def budget_bytes(budget: int | float | str | None, device: _native.Device) -> int | None:
    """A budget of ``enable`` in bytes: a float is a fraction of the device's memory.

    Raises:
        ConfigError: a fraction outside of (0, 1], or not a size.
    """
    if budget is None:
        return None
    if isinstance(budget, float):
        if not 0 < budget <= 1:
            raise ConfigError(
                f"budget={budget}: a fraction of the device's memory lies in (0, 1]; "
                "write bytes as a whole number or as '10GiB'"
            )
        return int(budget * device.total_bytes)
    return parse_bytes(budget)


def _residency(sizes: list[int], slots: int) -> Iterator[tuple[int, list[bool]]]:
    """Bytes needed, and which units stay on the device for them; most units first.

    They are spread evenly, so that each streamed unit's load has a resident neighbour's compute
    to hide behind.
    """
    count = len(sizes)
    for kept in range(count, -1, -1):
        resident = [(i + 1) * kept // count > i * kept // count for i in range(count)]
        streamed = [size for size, stays in zip(sizes, resident, strict=True) if not stays]
        shared = min(slots, len(streamed)) * max(streamed, default=0)
        yield shared + sum(sizes) - sum(streamed), resident


def choose_resident(sizes: list[int], budget: int | None, slots: int) -> list[bool]:
    """Which units stay on the device: as many as fit in the budget beside the slots.

    Raises:
        BudgetError: not even the slots fit.
    """
    if budget is None:
        return [False] * len(sizes)
    align: int = load_native().SLOT_ALIGNMENT
    aligned = [-(-size // align) * align for size in sizes]
    for need, resident in _residency(aligned, slots):
        if need <= budget:
            return resident
    minimum = min(need for need, _ in _residency(aligned, slots))
    least = min(need for need, _ in _residency(aligned, 2))
    fewer = f", or set prefetch=0, which needs {format_bytes(least)}" if least < minimum else ""
    raise BudgetError(
        f"a budget of {format_bytes(budget)} is below the minimum of {format_bytes(minimum)} "
        f"({minimum} bytes) for {len(sizes)} units, the largest of {format_bytes(max(sizes))}, "
        f"in {slots} slots. Raise the budget{fewer}",
        minimum=minimum,
    )


def slot_count(slots: int | None, prefetch: int, units: int) -> int:
    """How many slots there will be; ``None`` is prefetch + 2, at most one a unit.

    Raises:
        ConfigError: a negative prefetch, or fewer slots than it needs.
    """
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise ConfigError(f"prefetch={prefetch!r}: the number of units to load ahead, 0 or more")
    if slots is None:
        return min(prefetch + 2, units)
    if isinstance(slots, bool) or not isinstance(slots, int) or slots < min(prefetch + 2, units):
        raise ConfigError(
            f"slots={slots!r}: prefetch={prefetch} needs at least {min(prefetch + 2, units)} "
            "(the unit in use, the one before it, and those loaded ahead)"
        )
    return slots
