"""`summary.json`: everything that is known of a run when it ends."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trae_mem.errors import ConfigError

SUMMARY = "summary.json"
EVENTS = "events.jsonl"
MEMORY = "memory.jsonl"
MEMORY_PLOT = "memory.png"
LAYERS_PLOT = "layers.png"
ADAPTER = "adapter"
RESIDENT = "resident"  # the folder of the all-resident run that a comparison sets beside ours

Outcome = Literal["finished", "interrupted", "failed"]


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step."""

    step: int  # counted from 1
    loss: float  # in full precision
    seconds: float  # from the first micro-step to the end of the optimizer's work
    tokens: int
    begin_ns: int  # time.monotonic_ns()
    end_ns: int
    stall_seconds: float  # compute waited for a load
    loads: int  # layers loaded
    bytes_on_device: int  # of the units' weights: slots and resident units


@dataclass(frozen=True)
class Check:
    """One figure that was asked for, and whether it was reached."""

    name: str
    value: float
    bound: float
    unit: str
    ok: bool


@dataclass
class RunRecord:
    """A run, as `summary.json` holds it."""

    config: dict[str, Any]
    environment: dict[str, Any]
    outcome: Outcome = "failed"
    error: str | None = None
    begin_ns: int = 0  # time.monotonic_ns() at the start of the process's own work
    load_seconds: float = 0.0  # model, text and LoRA, up to the first step
    train_seconds: float = 0.0
    device: str = "cpu"
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    status: dict[str, Any] | None = None  # trae_mem.Status at the end; None: nothing streamed
    peak_rss_bytes: int = 0
    paths: dict[str, str] = field(default_factory=dict)
    comparison: dict[str, Any] | None = None
    checks: list[Check] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [step.loss for step in self.steps]

    @property
    def median_step_seconds(self) -> float:
        """The median over the steps, the first left out (it warms everything up)."""
        return median_step_seconds(self.steps)

    @property
    def stall_share(self) -> float:
        """Share of the steps' time in which compute waited for a load; waiting between the steps
        does not count."""
        total = sum(step.seconds for step in self.steps)
        return sum(step.stall_seconds for step in self.steps) / total if total else 0.0

    @property
    def streamed(self) -> bool:
        """Whether layers were streamed in this run."""
        return self.status is not None

    def write(self, folder: Path) -> None:
        """Writes `summary.json`; the steps become columns, which keeps long runs readable."""
        values = dataclasses.asdict(self)
        names = [f.name for f in dataclasses.fields(StepRecord)]
        values["steps"] = {name: [getattr(step, name) for step in self.steps] for name in names}
        values["summary"] = {
            "steps": len(self.steps),
            "first_loss": self.losses[0] if self.steps else None,
            "last_loss": self.losses[-1] if self.steps else None,
            "median_step_seconds": self.median_step_seconds,
            "stall_share": self.stall_share,
        }
        text = json.dumps(values, indent=2, ensure_ascii=False)
        (folder / SUMMARY).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> RunRecord:
        """Reads `summary.json` of a run's folder.

        Raises:
            ConfigError: There is none, or it is not what `write` wrote.
        """
        path = folder / SUMMARY
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            columns = values.pop("steps")
            values.pop("summary")
            rows = zip(*columns.values(), strict=True)
            steps = [StepRecord(**dict(zip(columns, row, strict=True))) for row in rows]
            checks = [Check(**check) for check in values.pop("checks")]
            return cls(steps=steps, checks=checks, **values)
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be read: {error.strerror}; name the output_dir of a run"
            ) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{path}: not the summary of a run: {error!r}") from error


def median_step_seconds(steps: Sequence[StepRecord]) -> float:
    """The median step time, the first step left out; 0 when there is no step."""
    seconds = [step.seconds for step in steps[1:] or steps]
    return statistics.median(seconds) if seconds else 0.0
