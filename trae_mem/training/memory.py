"""What this process takes of the machine's memory: now, at most, and over time."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import psutil


def current_rss() -> int:
    """Resident memory of this process now, in bytes."""
    return int(psutil.Process(os.getpid()).memory_info().rss)


def peak_rss() -> int:
    """The most resident memory this process has had, in bytes.

    `VmHWM`, not `ru_maxrss`: the latter survives `exec`, so a child process would report the size
    of the process that started it.
    """
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class MemorySampler:
    """Samples the resident memory of this process on a thread, from `with` to its end.

    When the samples are many, every second one is dropped and the interval doubles: a run of days
    costs as much memory as one of minutes.
    """

    def __init__(self, interval: float = 0.1, limit: int = 4096) -> None:
        self._interval = interval  # seconds
        self._limit = limit  # samples kept, at most
        self._samples: list[tuple[int, int]] = []  # (time.monotonic_ns(), resident bytes)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trae-mem-rss", daemon=True)

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def samples(self) -> list[tuple[int, int]]:
        """(time.monotonic_ns(), resident bytes), oldest first."""
        return list(self._samples)

    def _run(self) -> None:
        while True:
            self._samples.append((time.monotonic_ns(), current_rss()))
            if len(self._samples) >= self._limit:
                self._samples = self._samples[::2]
                self._interval *= 2
            if self._stop.wait(self._interval):
                return


def write_samples(path: Path, samples: Iterable[tuple[int, int]]) -> None:
    """One JSON line a sample: {"time_ns": …, "rss": …}."""
    with path.open("w", encoding="utf-8") as file:
        for time_ns, rss in samples:
            file.write(json.dumps({"time_ns": time_ns, "rss": rss}) + "\n")
