"""What all benchmarks share: the report, timing in turns, medians and their spread."""

from __future__ import annotations

import contextlib
import gc
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trae_mem.bench.environment import describe_benchmark_environment
from trae_mem.errors import ConfigError
from trae_mem.report.summary import Check

if TYPE_CHECKING:
    from rich.console import Console

Report = dict[str, Any]  # {"benchmark", "environment", "settings", "results", "checks"}


@dataclass(frozen=True)
class Outcome:
    """What a benchmark found."""

    settings: dict[str, Any]  # "threads" is one of them
    results: dict[str, Any]
    checks: list[Check]
    device: str = "cpu"  # that computed: "cpu" or "cuda"
    simulated: str | None = None  # the card that was simulated


def make_report(name: str, outcome: Outcome) -> Report:
    """The outcome with the machine that it was measured on, as it is written to JSON."""
    return {
        "benchmark": name,
        "environment": describe_benchmark_environment(
            outcome.settings["threads"], outcome.device, outcome.simulated
        ),
        "settings": outcome.settings,
        "results": outcome.results,
        "checks": [asdict(check) for check in outcome.checks],
    }


def write_report(report: Report, path: str) -> None:
    """Writes the report to a file, or to standard output for ``-``."""
    text = json.dumps(report, indent=1) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")


def read_report(path: Path) -> Report:
    """A report that ``write_report`` wrote.

    Raises:
        ConfigError: no such file, or not such a report.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"'{path}' cannot be read as a benchmark's JSON: {error}") from error
    if not isinstance(report, dict) or not {"benchmark", "environment", "results"} <= set(report):
        raise ConfigError(f"'{path}' is not a benchmark's JSON: trae-mem bench NAME --json PATH")
    return report


def at_least(name: str, value: float, bound: float, unit: str = "") -> Check:
    """A check that passes when the value reaches the bound."""
    return Check(f"{name}, at least", value, bound, unit, value >= bound)


def at_most(name: str, value: float, bound: float, unit: str = "") -> Check:
    """A check that passes when the value stays within the bound."""
    return Check(f"{name}, at most", value, bound, unit, value <= bound)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and count of repeated measurements."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {"median": statistics.median(values), "q1": low, "q3": high, "count": len(values)}


@contextlib.contextmanager
def measuring(threads: int) -> Iterator[None]:
    """Compute on that many threads, and no garbage collection inside of a measurement."""
    threads_before, collected = torch.get_num_threads(), gc.isenabled()
    gc.collect()
    gc.disable()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)
        if collected:
            gc.enable()


def print_checks(console: Console, report: Report) -> None:
    """Each figure that is asked for, with its bound."""
    from rich.table import Table

    table = Table(title="Checks", title_justify="left")
    for column in ("check", "value", "bound", "unit", ""):
        table.add_column(column, justify="left" if column in ("check", "unit", "") else "right")
    for check in report["checks"]:
        mark = "[green]ok[/green]" if check["ok"] else "[red]missed[/red]"
        bound = f"{check['bound']:g}"
        table.add_row(check["name"], f"{check['value']:.4g}", bound, check["unit"], mark)
    console.print(table)


def all_reached(report: Report) -> bool:
    """Whether no check was missed."""
    return all(check["ok"] for check in report["checks"])
