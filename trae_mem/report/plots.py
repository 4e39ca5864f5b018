"""The two pictures of a run: memory over time, and which layer was on the device when.

Drawn from recorded data alone, with matplotlib's object interface (no global state, no display).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from trae_mem.recorder import Event
from trae_mem.report import events as recorded
from trae_mem.report.summary import (
    EVENTS,
    LAYERS_PLOT,
    MEMORY,
    MEMORY_PLOT,
    RESIDENT,
    RunRecord,
    StepRecord,
)

# Colours that colour-blind readers can tell apart (Okabe and Ito).
_BLUE, _SKY, _ORANGE, _RED, _GREEN, _GREY = (
    "#0072B2",
    "#9ecbe8",
    "#E69F00",
    "#D55E00",
    "#009E73",
    "#777777",
)
_MIB = 1 << 20


def render(folder: Path) -> list[Path]:
    """Draws every plot that the recorded files of the folder allow; returns their paths."""
    record = RunRecord.read(folder)
    events = recorded.read_events(folder / EVENTS)
    written: list[Path] = []
    samples = read_samples(folder / MEMORY)
    if samples:
        other = read_samples(folder / RESIDENT / MEMORY)
        figure = memory_timeline(record, samples, events, other)
        written.append(_save(figure, folder / MEMORY_PLOT))
    if events and record.steps:
        figure = layer_timeline(events, record.steps)
        written.append(_save(figure, folder / LAYERS_PLOT))
    return written


def read_samples(path: Path) -> list[tuple[int, int]]:
    """(time.monotonic_ns(), resident bytes) of each line; an absent file holds none."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [(entry["time_ns"], entry["rss"]) for entry in map(json.loads, lines)]


def _save(figure: Figure, path: Path) -> Path:
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=120)
    return path


def memory_timeline(
    record: RunRecord,
    samples: Sequence[tuple[int, int]],
    events: Sequence[Event],
    resident_samples: Sequence[tuple[int, int]] = (),
) -> Figure:
    """Layer weights on the device against their budget, over the memory of the whole process.

    Args:
        record: The run.
        samples: Resident memory of its process.
        events: What was recorded of the streaming; may end before the run does.
        resident_samples: Resident memory of the all-resident run beside it, if there was one.
    """
    start = samples[0][0]
    end = max(samples[-1][0], *(entry[0] for entry in resident_samples[-1:]), start + 1)
    figure = Figure(figsize=(9.0, 6.0), layout="constrained")
    axes: list[Any] = list(figure.subplots(2, 1, sharex=True))
    _draw_weights(axes[0], record, events, start)
    _draw_processes(axes[1], samples, resident_samples, start)
    axes[1].set_xlim(0, (end - start) / 1e9)
    return figure


def _draw_weights(axes: Any, record: RunRecord, events: Sequence[Event], start: int) -> None:
    """The layers' weights: what is loaded, what may be, and what all of them would take."""
    total = record.model.get("layer_bytes", 0)
    if record.status is not None:
        total = max(total, record.status["total_bytes"])
        series = recorded.loaded_bytes(events)
        times = [(time_ns - start) / 1e9 for time_ns, _ in series]
        loaded = [size / _MIB for _, size in series]
        if series and record.steps:
            times.append((min(record.steps[-1].end_ns, _last_recorded(record)) - start) / 1e9)
            loaded.append(loaded[-1])
        axes.fill_between(times, loaded, step="post", color=_SKY)
        axes.step(times, loaded, where="post", color=_BLUE, label="layer weights in slots")
        budget = record.status["bytes_on_device"]
        name = f"budget: {record.status['slots']} slots"
        if record.status["resident_units"]:
            name += f" and {record.status['resident_units']} resident units"
        axes.axhline(budget / _MIB, color=_RED, linestyle="--", label=_with_size(name, budget))
        cap = record.model.get("budget_bytes")
        if cap and cap <= 1.5 * total:  # a larger one would only flatten the curves
            label = _with_size("resource.budget", cap)
            axes.axhline(cap / _MIB, color=_GREEN, linestyle="-.", label=label)
    axes.axhline(
        total / _MIB, color=_GREY, linestyle=":", label=_with_size("all layers resident", total)
    )
    axes.set_ylim(0, 1.25 * total / _MIB)
    axes.set_ylabel("layer weights (MiB)")
    axes.set_title("Weights of the layers on the device")
    axes.legend(loc="upper right", ncols=2, fontsize="small")


def _last_recorded(record: RunRecord) -> int:
    """Where the recorded events end: with the last step that they cover."""
    covered = min(int(record.config["record_steps"]), len(record.steps))
    return record.steps[max(covered, 1) - 1].end_ns


def _with_size(name: str, size: int) -> str:
    return f"{name}, {size / _MIB:.1f} MiB"


def _draw_processes(
    axes: Any,
    samples: Sequence[tuple[int, int]],
    resident_samples: Sequence[tuple[int, int]],
    start: int,
) -> None:
    name = "streaming" if resident_samples else "process"
    for series, color, label in (
        (resident_samples, _ORANGE, "all resident"),
        (samples, _BLUE, name),
    ):
        if series:
            times = [(time_ns - start) / 1e9 for time_ns, _ in series]
            axes.plot(times, [rss / _MIB for _, rss in series], color=color, label=label)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("resident memory (MiB)")
    axes.set_xlabel("seconds")
    axes.set_title("Memory of the process" + ("es, training in turns" if resident_samples else ""))
    axes.legend(loc="lower right", fontsize="small")


def shown_steps(steps: Sequence[StepRecord], until_ns: int) -> list[StepRecord]:
    """The last step that the events cover, and the one before when it follows at once.

    Steps that are taken in turns with another process lie far apart: then one is shown.
    """
    covered = [step for step in steps if step.end_ns <= until_ns] or list(steps[:1])
    last = covered[-1]
    if len(covered) > 1:
        before = covered[-2]
        if last.begin_ns - before.end_ns < 0.2 * (last.end_ns - last.begin_ns):
            return [before, last]
    return [last]


def layer_timeline(events: Sequence[Event], steps: Sequence[StepRecord]) -> Figure:
    """Time against layer: on the device, in use, loading, and compute waiting for a load."""
    until = max(event.end_ns for event in events)
    # The last release of a step may come a moment after the Trainer's own clock stopped.
    shown = shown_steps(steps, until + 1_000_000_000)
    begin, end = shown[0].begin_ns, shown[-1].end_ns
    figure = Figure(figsize=(9.0, 6.0), layout="constrained")
    axes: Any = figure.subplots()
    layers = (
        ("on the device", recorded.residence(events, until), _SKY, 0.8),
        ("loading", recorded.spans(events, "load"), _GREEN, 0.8),
        ("in use", recorded.compute(events, until), _BLUE, 0.5),
        ("compute waits", recorded.spans(events, "stall"), _RED, 0.8),
    )
    for label, found, color, height in layers:
        _draw_spans(axes, found, begin, end, color, height, label)
    units = sorted({event.unit for event in events})
    axes.set_ylim(units[0] - 1, units[-1] + 1)
    axes.set_xlim(0, (end - begin) / 1e9)
    for step in shown[1:]:
        axes.axvline((step.begin_ns - begin) / 1e9, color=_GREY, linestyle=":")
    numbers = " and ".join(str(step.step) for step in shown)
    plural = "s" if len(shown) > 1 else ""
    axes.set_title(f"Which layer was on the device when: step{plural} {numbers}")
    axes.set_xlabel("seconds")
    axes.set_ylabel("layer")
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.1), ncols=4, frameon=False)
    return figure


def _draw_spans(
    axes: Any,
    found: Sequence[recorded.Span],
    begin: int,
    end: int,
    color: str,
    height: float,
    label: str,
) -> None:
    seconds: dict[int, list[tuple[float, float]]] = {}
    for span in found:
        left, right = max(span.begin_ns, begin), min(span.end_ns, end)
        if left < right:
            row = seconds.setdefault(span.unit, [])
            row.append(((left - begin) / 1e9, (right - left) / 1e9))
    for number, (unit, bars) in enumerate(sorted(seconds.items())):
        axes.broken_barh(
            bars,
            (unit - height / 2, height),
            facecolors=color,
            label=label if number == 0 else None,
        )
