"""The step time of an engine without any cost of its own: what the rules of streaming allow.

`max(compute, transfer)` cannot be reached exactly. Forward and backward each have a balance of
their own; at each turn-around the link has nothing to do, since the slots hold the units that are
needed next; and where compute is quicker for a while than the link, and slower for a while, few
slots cannot even it out.
"""

from __future__ import annotations

from collections.abc import Sequence


def ideal_step_seconds(
    forward: Sequence[float],
    backward: Sequence[float],
    load: float,
    *,
    slots: int,
    prefetch: int,
    host_runs_ahead: bool = False,
) -> float:
    """Seconds of a training step in the steady state.

    Args:
        forward: seconds of compute of each unit forward, from the first unit to the last.
        backward: seconds of compute of each unit backward, from the last unit to the first.
        load: seconds that the link takes for one unit.
        slots, prefetch: as in ``trae_mem.enable``.
        host_runs_ahead: of the compute, as on a GPU. A load is then asked for long before the
            compute comes to its unit, with or without prefetch, and begins as soon as its slot is
            free.
    """
    units = len(forward)
    schedule = _Schedule(load, min(slots, units), prefetch, host_runs_ahead)
    before = 0.0
    for _ in range(2):  # the first step settles, the second is the steady state
        before = schedule.now
        schedule.run_through(list(range(units)), forward)
        schedule.run_through(list(range(units - 1, -1, -1)), backward)
    return schedule.now - before


class _Schedule:
    """Follows [Note: looking ahead] of csrc/core/layer_streamer.h."""

    def __init__(self, load: float, slots: int, prefetch: int, host_runs_ahead: bool) -> None:
        self.now = 0.0
        self._load, self._slots, self._prefetch = load, slots, prefetch
        self._host_runs_ahead = host_runs_ahead
        self._link_free = 0.0
        self._owners = list(range(slots))  # of each slot
        self._ready = [0.0] * slots  # when its owner's bytes are there
        self._released = [0.0] * slots  # when its owner's last use ends

    def run_through(self, order: list[int], seconds: Sequence[float]) -> None:
        for position, unit in enumerate(order):
            self._require(unit)
            slot = unit % self._slots
            begin = max(self.now, self._ready[slot])
            self._prefetch_from(order, position)
            self.now = begin + seconds[position]
            self._released[slot] = self.now

    def _prefetch_from(self, order: list[int], position: int) -> None:
        begun = 0
        for ahead in range(1, self._slots):
            if begun == self._prefetch or position + ahead >= len(order):
                return
            begun += self._require(order[position + ahead])

    def _require(self, unit: int) -> bool:
        """Begins the unit's load if it is not there; whether it did."""
        slot = unit % self._slots
        if self._owners[slot] == unit:
            return False
        self._owners[slot] = unit
        asked = 0.0 if self._host_runs_ahead else self.now
        begin = max(self._link_free, asked, self._released[slot])
        self._link_free = self._ready[slot] = begin + self._load
        return True
