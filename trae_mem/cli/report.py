"""`trae-mem report FOLDER`: shows a run again from its recorded files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The output_dir of a run.")],
    chrome_trace: Annotated[
        Path | None,
        typer.Option(
            "--chrome-trace",
            metavar="PATH",
            help="Write the recorded events for chrome://tracing or ui.perfetto.dev.",
        ),
    ] = None,
) -> None:
    """Draw the plots of a finished run again, print its tables, export its timeline."""
    from trae_mem.recorder import chrome_trace as to_chrome_trace
    from trae_mem.report import plots, tables
    from trae_mem.report.events import read_events
    from trae_mem.report.summary import EVENTS, RunRecord

    console = tables.make_console()
    record = RunRecord.read(folder)
    tables.print_summary(console, record)
    tables.print_checks(console, record)
    tables.print_comparison(console, record)
    for picture in plots.render(folder):
        tables.print_line(console, f"plot: {picture}")
    if chrome_trace is not None:
        entries = to_chrome_trace(read_events(folder / EVENTS))
        chrome_trace.write_text(json.dumps({"traceEvents": entries}), encoding="utf-8")
        text = f"trace: {chrome_trace} (open it in chrome://tracing or https://ui.perfetto.dev)"
        tables.print_line(console, text)
