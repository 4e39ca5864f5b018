"""The live line: a progress bar on a terminal, plain lines where the output goes to a file."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trae_mem.report.tables import print_line


class LiveLine:
    """Shows how far a run is. On a terminal one line moves; elsewhere lines are printed, the first,
    the last and at most one every `interval` seconds between them.
    """

    def __init__(self, console: Console, total: int, interval: float = 1.0) -> None:
        self._console = console
        self._total = total
        self._interval = interval
        self._printed = float("-inf")
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.description}", markup=False),
                console=console,
                refresh_per_second=2,  # a step takes longer, and drawing takes time from it
            )
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> LiveLine:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, step: int, text: str) -> None:
        """The state after that step (counted from 1)."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
            return
        now = time.monotonic()
        if step in (1, self._total) or now - self._printed >= self._interval:
            self._printed = now
            print_line(self._console, f"step {step}/{self._total}  {text}")
