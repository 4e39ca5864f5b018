"""The step time of an engine without any cost of its own: what the rules of streaming allow.

`max(compute, transfer)` cannot be reached exactly. Forward and backward each have their own
balance, and at each turn-around the link has nothing to do: the slots hold the units that are
needed next, and none is loaded before one of them is done with.
"""

from __future__ import annotations

from collections.abc import Sequence


def ideal_step_seconds(
    forward: float, backward: float, load: float, units: int, slots: int, prefetch: int
) -> float:
    """Seconds of a training step in the steady state.

    Args:
        forward: seconds of compute of one unit, forward.
        backward: the same, backward.
        load: seconds that the link takes for one unit.
        units, slots, prefetch: as in ``trae_mem.enable``.
    """
    passes = [(range(units), forward), (range(units - 1, -1, -1), backward)]
    ready = dict.fromkeys(range(min(slots, units)), 0.0)  # unit -> when its bytes are there
    free: dict[int, float] = {}  # slot -> when its last user was done
    link = now = before = 0.0
    for _ in range(2):  # the first step settles, the second is the steady state
        before = now
        for order, seconds in passes:
            for position, unit in enumerate(order):
                for wanted in order[position : position + prefetch + 1]:
                    if wanted in ready:
                        continue
                    owner = _owner(ready, wanted % slots, slots)
                    if owner in _between(order, position, wanted):
                        break
                    ready.pop(owner, None)
                    link = max(link, now, free.get(wanted % slots, 0.0)) + load
                    ready[wanted] = link
                now = max(now, ready[unit]) + seconds
                free[unit % slots] = now
    return now - before


def _owner(ready: dict[int, float], slot: int, slots: int) -> int:
    return next((unit for unit in ready if unit % slots == slot), -1)


def _between(order: Sequence[int], position: int, wanted: int) -> Sequence[int]:
    """The units from the current one to just before the wanted one: never evicted for it."""
    return order[position : order.index(wanted)]
