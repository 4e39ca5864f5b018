"""The tables that a run ends with."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from trae_mem.report.summary import RunRecord, StepRecord
from trae_mem.sizes import format_bytes


def make_console(*, stderr: bool = False) -> Console:
    """Standard output or error: as wide as the terminal, or as our tables when it is none."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=120)


def print_line(console: Console, text: str) -> None:
    """One line of plain text, however long."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def mean_loss(steps: list[StepRecord], count: int = 3) -> tuple[float, float]:
    """Means of the first and the last `count` losses: single ones are noisy."""
    losses = [step.loss for step in steps]
    count = min(count, len(losses))
    return sum(losses[:count]) / count, sum(losses[-count:]) / count


def print_summary(console: Console, record: RunRecord) -> None:
    """The run in one table."""
    table = Table(title=f"Run {record.outcome}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, value in summary_rows(record):
        table.add_row(name, value)
    console.print(table)


def summary_rows(record: RunRecord) -> list[tuple[str, str]]:
    """(name, value) of everything worth a line."""
    rows: list[tuple[str, str]] = []
    if record.error:
        rows.append(("error", record.error))
    if record.model:
        rows.append(
            (
                "model",
                f"{record.config['model_config']['model']}, {record.model['layers']} layers, "
                f"{record.model['parameters'] / 1e6:.1f} M parameters, "
                f"{record.model['trainable_parameters'] / 1e6:.2f} M trained",
            )
        )
    if record.steps:
        first, last = mean_loss(record.steps)
        tokens = sum(step.tokens for step in record.steps)
        seconds = sum(step.seconds for step in record.steps)
        rows += [
            ("steps", f"{len(record.steps)}, {record.median_step_seconds:.3f} s each (median)"),
            ("loss", f"{record.losses[0]:.4f} -> {record.losses[-1]:.4f}"),
            ("mean of the first and last 3", f"{first:.4f} -> {last:.4f}"),
            ("tokens/s", f"{tokens / seconds:.0f}"),
        ]
    rows += [
        (f"evaluation loss after step {entry['step']:.0f}", f"{entry['loss']:.4f}")
        for entry in record.evaluations
    ]
    if record.status is not None:
        rows += _streaming_rows(record, record.status)
    if record.peak_rss_bytes:
        rows.append(("peak memory of the process", format_bytes(record.peak_rss_bytes)))
    return rows


def _streaming_rows(record: RunRecord, status: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (
            "layer weights on the device",
            f"{format_bytes(status['bytes_on_device'])} of {format_bytes(status['total_bytes'])}: "
            f"{status['slots']} slots for {status['streamed_units']} streamed units, "
            f"{status['resident_units']} resident",
        ),
        (
            "loads",
            f"{status['loads']} from {'files' if status['source'] == 'file' else 'RAM'}, "
            f"{format_bytes(status['load_bytes'])}; {status['hits']} of {status['acquires']} "
            "acquires found their layer there",
        ),
        ("stall share", f"{100 * record.stall_share:.2f} % of the steps' time"),
    ]


def print_comparison(console: Console, record: RunRecord) -> None:
    """Streaming beside all resident, from the `comparison` of a run."""
    comparison = record.comparison
    if comparison is None:
        return
    ours, theirs = comparison["streaming"], comparison["resident"]
    table = Table(title="Streaming beside all resident, same run", title_justify="left")
    table.add_column("", style="bold")
    table.add_column("streaming", justify="right")
    table.add_column("all resident", justify="right")
    table.add_column("streaming / resident", justify="right")

    def add(name: str, key: str, form: Any) -> None:
        ratio = f"{ours[key] / theirs[key]:.3f}" if theirs[key] else ""
        table.add_row(name, form(ours[key]), form(theirs[key]), ratio)

    add("layer weights on the device", "layer_bytes_on_device", format_bytes)
    table.add_row(
        "layers on the device",
        f"{ours['layers_on_device']:g} of {ours['layers']}",
        f"{theirs['layers_on_device']:g} of {theirs['layers']}",
        "",
    )
    add("peak memory of the process", "peak_rss_bytes", format_bytes)
    table.add_row(
        "seconds a step (median)",
        f"{ours['median_step_seconds']:.3f}",
        f"{theirs['median_step_seconds']:.3f}",
        f"{comparison['step_time_ratio']:.3f}",
    )
    table.add_row("stall share", f"{100 * ours['stall_share']:.2f} %", "", "")
    for name, key in (("first loss", "first_loss"), ("last loss", "last_loss")):
        table.add_row(name, f"{ours[key]:.6f}", f"{theirs[key]:.6f}", "")
    table.add_row(
        "mean loss, first -> last 3 steps",
        f"{ours['mean_first_3']:.4f} -> {ours['mean_last_3']:.4f}",
        f"{theirs['mean_first_3']:.4f} -> {theirs['mean_last_3']:.4f}",
        "",
    )
    same = "yes" if comparison["losses_identical"] else "NO"
    table.add_row("losses identical, bit for bit", same, "", "")
    console.print(table)
    low, high = comparison["step_time_ratio_quartiles"]
    console.print(
        f"The step time ratio is the median over {comparison['compared_steps']} pairs of steps "
        f"taken in turns (quartiles {low:.3f} to {high:.3f}).",
        highlight=False,
    )


def print_checks(console: Console, record: RunRecord) -> None:
    """Each check with its bound; nothing when there are none."""
    if not record.checks:
        return
    table = Table(title="Checks", title_justify="left")
    for column in ("check", "value", "bound", "unit", ""):
        table.add_column(column)
    for check in record.checks:
        mark = "[green]ok[/green]" if check.ok else "[red]missed[/red]"
        table.add_row(check.name, f"{check.value:g}", f"{check.bound:g}", check.unit, mark)
    console.print(table)
