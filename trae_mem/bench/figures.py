"""Draws a benchmark's report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from trae_mem.bench.environment import machine_line
from trae_mem.bench.figures_headline import headline
from trae_mem.bench.harness import Report
from trae_mem.errors import ConfigError

# Colours that colour-blind readers can tell apart (Okabe and Ito).
_BLUE, _SKY, _ORANGE, _RED, _GREEN, _GREY = (
    "#0072B2",
    "#56B4E9",
    "#E69F00",
    "#D55E00",
    "#009E73",
    "#777777",
)
_MIB = 1 << 20
_GIB = 1 << 30


def draw(report: Report, path: Path) -> None:
    """Draws the report of any benchmark into a PNG file.

    Raises:
        ConfigError: a benchmark that has no figure.
    """
    name = report["benchmark"]
    if name not in _DRAWERS:
        raise ConfigError(f"no figure for benchmark {name!r}; there is one for {list(_DRAWERS)}")
    figure = _DRAWERS[name](report)
    figure.supxlabel(machine_line(report["environment"]), fontsize=8, color=_GREY)
    FigureCanvasAgg(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def _plain(axes: Any) -> None:
    """No frame on the sides where there is no scale."""
    axes.spines[["top", "right"]].set_visible(False)


def _overlap(report: Report) -> Figure:
    points = report["results"]["points"]
    ratios = sorted({point["ratio"] for point in points})
    prefetches = sorted({point["prefetch"] for point in points})
    figure = _figure(8.0, 3.9)
    axes: Any = figure.subplots()
    colors = [_ORANGE, _SKY, _BLUE, _GREEN, _RED, _GREY]
    width = 0.8 / len(prefetches)
    for number, prefetch in enumerate(prefetches):
        own = {point["ratio"]: point for point in points if point["prefetch"] == prefetch}
        places = [i + (number - (len(prefetches) - 1) / 2) * width for i in range(len(ratios))]
        found = [own[ratio]["efficiency"] for ratio in ratios]
        medians = [one["median"] for one in found]
        errors = [
            [max(0.0, one["median"] - one["q1"]) for one in found],
            [max(0.0, one["q3"] - one["median"]) for one in found],
        ]
        label = f"prefetch {prefetch} ({own[ratios[0]]['slots']} slots)"
        axes.bar(places, medians, width * 0.92, color=colors[number % len(colors)], label=label)
        axes.errorbar(places, medians, errors, fmt="none", ecolor="black", elinewidth=0.8)
        ideal = [own[ratio]["efficiency_of_ideal_engine"]["median"] for ratio in ratios]
        axes.plot(
            places,
            ideal,
            linestyle="none",
            marker="_",
            markersize=14,
            markeredgewidth=1.6,
            color="black",
            label="an engine without cost" if number == len(prefetches) - 1 else None,
        )
    if report["benchmark"] == "overlap_cuda":
        for place, ratio in enumerate(ratios):
            alone = max(1.0, ratio) / (1.0 + ratio)
            named = {"label": "one after the other"} if place == 0 else {}
            axes.hlines(alone, place - 0.45, place + 0.45, color="black", ls=":", **named)
    axes.axhline(0.95, color=_GREY, linestyle="--", linewidth=1, label="asked for: 0.95")
    axes.set_xticks(range(len(ratios)), [f"{ratio:g} x compute" for ratio in ratios])
    axes.set_xlabel("time that the link needs for a step's loads")
    axes.set_ylabel("max(compute, transfer) / step time")
    axes.set_ylim(0, 1.08)
    shape = report["settings"]["shape"]
    axes.set_title(f"Loads hide behind compute: LoRA training, {shape['layers']} streamed layers")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    _plain(axes)
    return figure


def _footprint(report: Report) -> Figure:
    results = report["results"]
    looks = {
        "resident": ("all resident", _ORANGE, "o"),
        "ram": ("streamed from RAM", _SKY, "s"),
        "file": ("streamed from the file", _BLUE, "D"),
    }
    figure = _figure(8.0, 3.9)
    axes: Any = figure.subplots()
    for variant in sorted(report["settings"]["variants"], key=list(looks)[::1].index):
        own = [point for point in results["points"] if point["variant"] == variant]
        weights = [point["weight_bytes"] / _GIB for point in own]
        peaks = [point["peak_bytes"]["median"] / _GIB for point in own]
        label, color, marker = looks[variant]
        growth = results["growth"][variant]
        axes.plot(weights, peaks, color=color, marker=marker, markersize=5)
        axes.annotate(
            f"{label}:\ngrows by {100 * growth:.1f} % of the added weights",
            (weights[-1], peaks[-1]),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=color,
            fontsize=9,
        )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("weights of the layers (GiB)")
    axes.set_ylabel("peak memory of the process (GiB)")
    axes.set_title("Memory over model depth, LoRA training")
    _plain(axes)
    return figure


def _hooks(report: Report) -> Figure:
    added = report["results"]["added_microseconds"]
    blocks = report["results"]["empty_block_microseconds"]
    names = list(blocks)
    figure = _figure(6.5, 2.6)
    axes: Any = figure.subplots()
    bare = [blocks[name]["median"] for name in names]
    ours = [added[name]["median"] for name in names]
    errors = [
        [max(0.0, added[name]["median"] - added[name]["q1"]) for name in names],
        [max(0.0, added[name]["q3"] - added[name]["median"]) for name in names],
    ]
    axes.barh(names, ours, xerr=errors, color=_BLUE, label="added by our hooks", height=0.5)
    axes.plot(bare, names, "|", color="black", markersize=18, label="an empty block itself")
    axes.axvline(30, color=_GREY, linestyle="--", linewidth=1, label="asked for: 30")
    axes.invert_yaxis()
    axes.set_xlim(0, max(34.0, *ours, *bare) * 1.05)
    axes.set_xlabel("microseconds for each unit and pass")
    axes.set_title(f"Host cost of a unit with {report['settings']['frozen_parameters']} weights")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    _plain(axes)
    return figure


def _peers(report: Report) -> Figure:
    rows = report["results"]["variants"]
    names = [row["variant"].replace(", by hand", "\n(frozen layers, by hand)") for row in rows]
    places = list(range(len(rows)))
    figure = _figure(10.5, 4.4)
    left, middle, right = figure.subplots(1, 3, sharey=True)
    panels: tuple[tuple[Any, str, str, str, Callable[[Any], float | None]], ...] = (
        (
            left,
            "layer weights on device (MiB)",
            "device_bytes_forward",
            "device_bytes_train",
            lambda value: float(value) / _MIB,
        ),
        (
            middle,
            "seconds",
            "forward_seconds",
            "train_seconds",
            lambda value: None if value is None else float(value["median"]),
        ),
        (
            right,
            "peak memory of the process (GiB)",
            "forward_peak_bytes",
            "train_peak_bytes",
            lambda value: float(value) / _GIB,
        ),
    )
    for axes, label, forward, train, convert in panels:
        for offset, key, color, name in (
            (-0.2, forward, _SKY, "forward"),
            (0.2, train, _BLUE, "training step"),
        ):
            values = [convert(row[key]) if _counts(row, key) else None for row in rows]
            bars = axes.barh(
                [place + offset for place in places],
                [value or 0.0 for value in values],
                0.38,
                color=color,
                label=name,
            )
            texts = ["cannot train" if value is None else _short(value) for value in values]
            labels = axes.bar_label(bars, texts, padding=2, fontsize=7.5)
            for text, value in zip(labels, values, strict=True):
                text.set_color(_RED if value is None else "black")
        axes.margins(x=0.14)
        axes.set_xlabel(label)
        _plain(axes)
    left.set_yticks(places, names)
    left.invert_yaxis()
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside upper right", ncols=2, frameon=False
    )
    shape = report["settings"]["shape"]
    figure.suptitle(
        f"The same Llama-shaped model, {shape['layers']} layers, LoRA", x=0.01, ha="left"
    )
    return figure


def _counts(row: dict[str, Any], key: str) -> bool:
    """A peer's training figures count where it trains."""
    return "train" not in key or bool(row["trains"])


_DRAWERS: dict[str, Callable[[Report], Figure]] = {
    "overlap": _overlap,
    "overlap_cuda": _overlap,
    "footprint": _footprint,
    "headline": headline,
    "hooks": _hooks,
    "peers": _peers,
}


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 5 else f"{value:.2f}"
