"""`trae-mem train CONFIG [key=value …]`: fine-tunes a model, and says what to type next."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trae_mem.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from trae_mem.config import RunConfig
    from trae_mem.report.summary import RunRecord

INTERRUPTED = 130


def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG [KEY=VALUE]...",
            help="The YAML file, then settings that replace its own: training.max_steps=4.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="CONFIG", help="The YAML file, as an option."),
    ] = None,
    json_path: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="PATH", help="Also write summary.json there; - is standard output."
        ),
    ] = None,
    turns: Annotated[int | None, typer.Option("--turns", hidden=True)] = None,
) -> None:
    """Fine-tune a model as a YAML file says, with its layers streamed.

    Ends with a summary, the LoRA adapter, summary.json, and plots in the output_dir. docs/config.md
    documents every key.
    """
    path, overrides = split_words(config, words or [])
    try:
        with _stopping_gently(turns is not None):
            record = _run(path, overrides, turns, json_path)
    except KeyboardInterrupt:  # before the training had begun
        print("trae-mem: interrupted, nothing was trained yet", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    if record.outcome == "interrupted":
        raise typer.Exit(INTERRUPTED)
    if not all(check.ok for check in record.checks):
        raise typer.Exit(1)


@contextlib.contextmanager
def _stopping_gently(child: bool) -> Iterator[None]:
    """SIGTERM, which schedulers send, saves what was trained just as Ctrl-C does.

    A child of a comparison listens to SIGINT in any case: a shell may have started the referee
    with that signal ignored, which processes inherit.
    """
    handled = [signal.SIGTERM, signal.SIGINT] if child else [signal.SIGTERM]
    before = [signal.signal(number, signal.default_int_handler) for number in handled]
    try:
        yield
    finally:
        for number, handler in zip(handled, before, strict=True):
            signal.signal(number, handler)


def _run(path: str, overrides: list[str], turns: int | None, json_path: str | None) -> RunRecord:
    from trae_mem.config import load_config
    from trae_mem.report.tables import make_console

    if json_path not in (None, "-") and not Path(json_path).absolute().parent.is_dir():
        raise ConfigError(f"--json {json_path}: there is no such folder")
    # Standard output belongs to the JSON where that was asked for.
    console = make_console(stderr=json_path == "-")
    settings = load_config(path, overrides)
    if turns is not None:
        record = _train_in_turns(settings, console, turns)
    elif settings.compare_resident:
        from trae_mem.training.comparison import run_comparison

        record = run_comparison(path, overrides, settings, console)
    else:
        from trae_mem.training.run import run_training

        record = run_training(settings, console)
    if turns is None:
        folder = Path(settings.output_dir).expanduser()
        _finish(console, record, folder)
        if json_path == "-":
            print((folder / "summary.json").read_text(encoding="utf-8"), end="")
        elif json_path is not None:
            shutil.copyfile(folder / "summary.json", json_path)
    return record


def split_words(config: str | None, words: list[str]) -> tuple[str, list[str]]:
    """(configuration file, overrides) from the command line's words.

    Raises:
        ConfigError: No file, or two.
    """
    overrides = [word for word in words if "=" in word and not Path(word).is_file()]
    files = [word for word in words if word not in overrides]
    files += [config] if config is not None else []
    if len(files) != 1:
        found = f"found {', '.join(files)}" if files else "found none"
        raise ConfigError(
            f"one configuration file is needed, {found}: trae-mem train CONFIG [key=value ...]"
        )
    return files[0], overrides


def _train_in_turns(settings: RunConfig, console: Console, descriptor: int) -> RunRecord:
    """One of the two processes of a comparison; `descriptor` is its socket to the referee."""
    from trae_mem.training.channel import Channel
    from trae_mem.training.run import run_training

    return run_training(settings, console, Channel.from_descriptor(descriptor))


def _finish(console: Console, record: RunRecord, folder: Path) -> None:
    """Plots, tables, and the next command to type."""
    from trae_mem.report import plots, tables

    pictures = plots.render(folder) if record.steps else []
    console.print()
    tables.print_summary(console, record)
    for name in ("adapter", "summary", "events"):
        if name in record.paths:
            tables.print_line(console, f"{name}: {record.paths[name]}")
    for picture in pictures:
        tables.print_line(console, f"plot: {picture}")
    tables.print_checks(console, record)
    tables.print_comparison(console, record)
    if record.streamed and record.steps:
        trace = folder / "trace.json"
        command = f"trae-mem report {shlex.quote(str(folder))}"
        tables.print_line(console, f"next: {command} --chrome-trace {shlex.quote(str(trace))}")
