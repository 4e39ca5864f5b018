"""Puts the verbs together and turns errors into messages and exit codes."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Annotated

import typer

from trae_mem.cli import bench, report, train
from trae_mem.errors import BudgetError, ConfigError, TraeMemError

app = typer.Typer(
    name="trae-mem",
    help="Fine-tune language models that are larger than your GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train.train)
app.command("report")(report.report)
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"trae-mem {importlib.metadata.version('trae-mem')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


def run(arguments: list[str]) -> int:
    """Runs one command; returns its exit code.

    The project's own errors are printed as they are: their messages say what to do, a traceback
    would not.
    """
    try:
        app(args=arguments, prog_name="trae-mem")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except TraeMemError as error:
        print(f"trae-mem: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | BudgetError) else 1
    return 0
