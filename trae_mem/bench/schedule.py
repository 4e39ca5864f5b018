"""The step time of an engine without any cost of its own: what the rules of streaming allow.

`max(compute, transfer)` cannot be reached exactly. Forward and backward each have a balance of
their own, and at each turn-around the link has nothing to do: the slots hold the units that are
needed next, and none can be loaded before one of them is done with.
"""

from __future__ import annotations


def ideal_step_seconds(
    forward: float, backward: float, load: float, units: int, slots: int, prefetch: int
) -> float:
    """Seconds of a training step in the steady state, without checkpointing.

    Args:
        forward: seconds of compute of one unit, forward.
        backward: the same, backward.
        load: seconds that the link takes for one unit.
        units, slots, prefetch: as in ``trae_mem.enable``.
    """
    schedule = _Schedule(load, min(slots, units), prefetch)
    before = 0.0
    for _ in range(2):  # the first step settles, the second is the steady state
        before = schedule.now
        schedule.run_through(list(range(units)), forward)
        schedule.run_through(list(range(units - 1, -1, -1)), backward)
    return schedule.now - before


class _Schedule:
    """Follows [Note: looking ahead] of csrc/core/layer_streamer.h."""

    def __init__(self, load: float, slots: int, prefetch: int) -> None:
        self.now = 0.0
        self._load, self._slots, self._prefetch = load, slots, prefetch
        self._link_free = 0.0
        self._owners = list(range(slots))  # of each slot
        self._ready = [0.0] * slots  # when its owner's bytes are there
        self._released = [0.0] * slots  # when its owner's last use ends

    def run_through(self, order: list[int], seconds: float) -> None:
        for position, unit in enumerate(order):
            self._require(unit)
            slot = unit % self._slots
            begin = max(self.now, self._ready[slot])
            self._prefetch_from(order, position)
            self.now = begin + seconds
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
        begin = max(self._link_free, self.now, self._released[slot])
        self._link_free = self._ready[slot] = begin + self._load
        return True
