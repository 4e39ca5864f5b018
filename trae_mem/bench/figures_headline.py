"""Draws what `trae-mem bench headline` found: memory over the steps, and model by model."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from trae_mem.bench.harness import Report

# Okabe and Ito, as in figures.py.
_BLUE, _SKY, _ORANGE, _RED, _GREY = "#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#777777"
_GIB = 1 << 30


def headline(report: Report) -> Figure:
    """Left: each step's peaks of the headline's run. Right: each model, beside its weights."""
    rows, card = report["results"]["runs"], report["results"]["card_bytes"] / _GIB
    figure = Figure(figsize=(11.0, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.15))
    streamed = [row for row in rows if row["role"] == "streams"]
    _steps(left, streamed[0], next(r for r in rows if r["role"] == "out of memory"), card)
    first = streamed[0]["dtype"]
    _models(right, [row for row in streamed if row["dtype"] == first], report, card)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    settings = report["settings"]
    figure.suptitle(
        f"LoRA on a simulated {settings['gpu']}: batch {settings['batch']} x "
        f"{settings['accumulation']}, {settings['length']} tokens, checkpointed, streaming",
        x=0.01,
        ha="left",
    )
    return figure


def _steps(axes: Any, row: dict[str, Any], resident: dict[str, Any], card: float) -> None:
    numbers = range(1, len(row["per_step"]) + 1)
    for key, label, color in (
        ("device_bytes", "the card, our slots counted", _BLUE),
        ("reserved_bytes", "reserved by torch", _SKY),
        ("allocated_bytes", "allocated by torch", _ORANGE),
    ):
        peaks = [step[key] / _GIB for step in row["per_step"]]
        axes.plot(numbers, peaks, color=color, label=label)
    axes.axhline(card, color=_GREY, linestyle="--", linewidth=1)
    axes.annotate(
        f"the card: {card:.0f} GiB",
        (max(1, len(row["per_step"])), card),
        (0, 3),
        textcoords="offset points",
        color=_GREY,
        ha="right",
        fontsize=9,
    )
    reached = resident["peak"]["device_bytes"] / _GIB
    if resident["out_of_memory"] is not None:
        look = {"marker": "x", "markersize": 9, "markeredgewidth": 2, "clip_on": False}
        axes.plot([1], [reached], color=_RED, linestyle="none", **look)
        axes.annotate(
            f"all resident, batch {resident['batch']}:\nout of memory in the first step",
            (1, reached),
            (12, -6),
            textcoords="offset points",
            color=_RED,
            va="top",
            fontsize=9,
        )
    axes.set_ylim(0, card * 1.12)
    axes.set_xlim(left=0.5)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("peak in each step (GiB)")
    axes.set_title(f"{row['model']} {row['dtype']}", fontsize=10)
    axes.legend(loc="center right", bbox_to_anchor=(1.0, 0.42), frameon=False, fontsize=9)


def _models(axes: Any, rows: list[dict[str, Any]], report: Report, card: float) -> None:
    smallest = {row["model"]: row["gib"] for row in report["results"]["smallest"]}
    places = list(range(len(rows)))
    weights = [row["weight_bytes"] / _GIB for row in rows]
    peaks = [row["peak"]["device_bytes"] / _GIB for row in rows]
    for offset, values, color, label in (
        (-0.2, weights, _GREY, "the model's weights"),
        (0.2, peaks, _BLUE, "peak of the card while training"),
    ):
        bars = axes.barh([p + offset for p in places], values, 0.38, color=color, label=label)
        axes.bar_label(bars, [f"{value:.1f}" for value in values], padding=3, fontsize=8)
    axes.axvline(card, color=_GREY, linestyle="--", linewidth=1, label=f"{card:.0f} GiB")
    names = [
        f"{row['model']}\n(fits {smallest[row['model']]} GiB)" if smallest else row["model"]
        for row in rows
    ]
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("GiB")
    axes.legend(loc="upper right", frameon=False, fontsize=9)
