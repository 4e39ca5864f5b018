"""Reading `events.jsonl`, and turning it into what a plot shows: when was which layer where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trae_mem.errors import ConfigError
from trae_mem.recorder import Event, read_json_lines


@dataclass(frozen=True)
class Span:
    """A stretch of time of one unit."""

    unit: int
    begin_ns: int
    end_ns: int


def read_events(path: Path) -> list[Event]:
    """The events of a run, in the order of their ends; an absent file holds none.

    Raises:
        ConfigError: The file is not what a Recorder writes.
    """
    if not path.exists():
        return []
    try:
        events = read_json_lines(path)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: not the events of a run: {error}") from error
    return sorted(events, key=lambda event: event.end_ns)


def residence(events: Sequence[Event], until_ns: int) -> list[Span]:
    """When each unit's weights lay on the device: from its load's end to its evict.

    A unit still there at the end stays until `until_ns`.
    """
    return _pairs(events, "load", "evict", until_ns)


def compute(events: Sequence[Event], until_ns: int) -> list[Span]:
    """When each unit was in use: from acquire to the next release of the same unit."""
    return _pairs(events, "acquire", "release", until_ns)


def spans(events: Iterable[Event], kind: str) -> list[Span]:
    """The events of one kind that last: loads and stalls."""
    return [Span(e.unit, e.begin_ns, e.end_ns) for e in events if e.kind == kind]


def loaded_bytes(events: Sequence[Event]) -> list[tuple[int, int]]:
    """(time, bytes of streamed weights that lie in slots) after each load and evict."""
    total = 0
    series: list[tuple[int, int]] = []
    held: dict[int, int] = {}
    for event in events:
        if event.kind == "load":
            total += event.bytes - held.get(event.unit, 0)
            held[event.unit] = event.bytes
        elif event.kind == "evict":
            total -= held.pop(event.unit, 0)
        else:
            continue
        series.append((event.end_ns, total))
    return series


def _pairs(events: Sequence[Event], opens: str, closes: str, until_ns: int) -> list[Span]:
    begun: dict[int, int] = {}
    found: list[Span] = []
    for event in events:
        if event.kind == opens:
            # acquire opens where compute may start, load where the bytes are there: at its end.
            begun.setdefault(event.unit, event.end_ns)
        elif event.kind == closes and event.unit in begun:
            found.append(Span(event.unit, begun.pop(event.unit), event.end_ns))
    found += [Span(unit, begin, until_ns) for unit, begin in begun.items() if begin < until_ns]
    return found
