"""Records what the engine did: one JSON object a line, or a Chrome trace."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from trae_mem.errors import ConfigError
from trae_mem.runtime import find_runtime

__all__ = ["Event", "Recorder", "chrome_trace", "read_json_lines"]

_KINDS = ("load", "acquire", "release", "stall", "evict")


@dataclass(frozen=True)
class Event:
    """One thing that happened to a unit.

    ``kind``: ``load`` (bytes copied into its window), ``acquire`` and ``release`` (its use begins
    and ends), ``stall`` (compute waited for it), ``evict`` (its slot goes to another). Times are
    those of ``time.monotonic_ns()``; ``bytes`` is that of a load, else 0.
    """

    kind: str
    unit: int
    unit_name: str
    slot: int
    bytes: int
    begin_ns: int
    end_ns: int


class Recorder:
    """Collects the events of a streaming model while it is open.

    The engine keeps the last 65,536 events in a ring; the recorder empties it before each pass of
    the model. ``lost`` counts events that were overwritten before that.

    Args:
        model: a model that streams.
        path: where ``close`` writes the events as JSON lines; ``None``: nowhere.

    Raises:
        ConfigError: the model does not stream.
    """

    def __init__(self, model: nn.Module, path: str | os.PathLike[str] | None = None) -> None:
        runtime = find_runtime(model)
        if runtime is None:
            raise ConfigError("only a model that streams can be recorded: trae_mem.enable(model)")
        self.lost = 0
        self._runtime = runtime
        self._names = [pack.unit.name for pack in runtime.packs]
        self._path = path
        self._events: list[Event] = []
        _, self._next, _ = runtime.streamer.events(2**63)
        self._open = True
        runtime.before_pass.append(self._collect)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _collect(self) -> None:
        entries, self._next, lost = self._runtime.streamer.events(self._next)
        self.lost += lost
        for kind, unit, slot, size, begin, end in entries:
            self._events.append(
                Event(_KINDS[kind], unit, self._names[unit], slot, size, begin, end)
            )

    def events(self) -> list[Event]:
        """Everything recorded so far, in the order of recording."""
        if self._open:
            self._collect()
        return list(self._events)

    def close(self) -> None:
        """Stops recording, and writes the file that was asked for. May be called again."""
        if not self._open:
            return
        self._collect()
        self._open = False
        self._runtime.before_pass.remove(self._collect)
        if self._path is not None:
            self.write_json_lines(self._path)

    def write_json_lines(self, path: str | os.PathLike[str]) -> None:
        """One event a line, with the fields of :class:`Event`."""
        lines = (json.dumps(asdict(event)) for event in self.events())
        Path(path).write_text("".join(line + "\n" for line in lines), encoding="utf-8")

    def write_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """A file for Perfetto or chrome://tracing."""
        text = json.dumps({"traceEvents": chrome_trace(self.events())})
        Path(path).write_text(text, encoding="utf-8")


def read_json_lines(path: str | os.PathLike[str]) -> list[Event]:
    """The events that ``write_json_lines`` wrote."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [Event(**json.loads(line)) for line in lines if line]


def chrome_trace(events: Iterable[Event]) -> list[dict[str, Any]]:
    """The events as "complete" entries of the Trace Event Format, on three tracks."""
    tracks = {"load": "copy", "stall": "stall", "use": "compute"}
    entries: list[dict[str, Any]] = []
    begun: dict[int, int] = {}

    def add(kind: str, event: Event, begin: int, end: int) -> None:
        entries.append(
            {
                "name": event.unit_name,
                "cat": kind,
                "ph": "X",
                "ts": begin / 1000,
                "dur": (end - begin) / 1000,
                "pid": 0,
                "tid": tracks[kind],
                "args": {"unit": event.unit, "slot": event.slot, "bytes": event.bytes},
            }
        )

    for event in events:
        if event.kind in ("load", "stall"):
            add(event.kind, event, event.begin_ns, event.end_ns)
        elif event.kind == "acquire":
            begun[event.unit] = event.begin_ns
        elif event.kind == "release" and event.unit in begun:
            add("use", event, begun.pop(event.unit), event.begin_ns)
    return entries
