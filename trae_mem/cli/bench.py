"""`trae-mem bench NAME`: measures, prints tables, writes JSON, draws the figure from it."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from trae_mem.errors import ConfigError

app = typer.Typer(
    help="Measure what streaming costs and saves; exit code 1 when a bound is missed.",
    no_args_is_help=True,
)

Json = Annotated[
    str | None,
    typer.Option("--json", metavar="PATH", help="Write the results there; - is standard output."),
]
Picture = Annotated[
    Path | None, typer.Option("--figure", metavar="PATH", help="Draw the results into this PNG.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer repetitions: noisier, and sooner.")]


@app.command()
def overlap(
    json_path: Json = None,
    figure: Picture = None,
    quick: Quick = False,
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda", help="Where the model computes.")
    ] = "cpu",
    sim: Annotated[
        str | None,
        typer.Option(metavar="CARD", help="With --device cuda: simulate this card, say A10."),
    ] = None,
) -> None:
    """How well loads hide behind compute, at three link speeds and four prefetches."""
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device}: expected cpu or cuda")
    if sim is not None and device != "cuda":
        raise ConfigError(f"--sim {sim} simulates a GPU: add --device cuda")
    if device == "cpu":
        _measure("overlap", json_path, figure, quick)
    else:
        card = None if sim is None else _known(sim)
        _measure("overlap_cuda", json_path, figure, quick, gpu=card)


@app.command()
def headline(
    json_path: Json = None,
    figure: Picture = None,
    quick: Quick = False,
    gpu: Annotated[str, typer.Option(metavar="CARD", help="The card to simulate.")] = "A10",
) -> None:
    """What fits on a simulated card: Llama models of 7B to 70B, LoRA, with and without us."""
    _measure("headline", json_path, figure, quick, gpu=_known(gpu))


@app.command()
def footprint(json_path: Json = None, figure: Picture = None, quick: Quick = False) -> None:
    """How a process's memory grows with the depth of the model that it trains."""
    _measure("footprint", json_path, figure, quick)


@app.command()
def hooks(json_path: Json = None, figure: Picture = None, quick: Quick = False) -> None:
    """What our hooks cost the host, for each unit and pass."""
    _measure("hooks", json_path, figure, quick)


@app.command()
def peers(json_path: Json = None, figure: Picture = None, quick: Quick = False) -> None:
    """accelerate's offloading and all resident beside ours."""
    _measure("peers", json_path, figure, quick)


@app.command()
def plot(
    results: Annotated[Path, typer.Argument(metavar="JSON", help="What --json wrote.")],
    figure: Annotated[Path, typer.Option("--figure", metavar="PATH", help="The PNG to draw.")],
) -> None:
    """Draw the figure of a benchmark again, from its JSON."""
    from trae_mem.bench.figures import draw
    from trae_mem.bench.harness import read_report

    draw(read_report(results), figure)
    typer.echo(f"figure: {figure}")


def _known(card: str) -> str:
    from trae_mem.gpus import find_gpu

    try:
        return find_gpu(card).name
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _measure(
    name: str, json_path: str | None, figure: Path | None, quick: bool, **changes: Any
) -> None:
    from rich.console import Console

    from trae_mem.bench.harness import all_reached, make_report, print_checks, write_report

    for path in (json_path, figure):
        _check_folder(path)
    # Standard output belongs to the JSON where that was asked for.
    console = Console(stderr=json_path == "-")
    benchmark: Any = importlib.import_module(f"trae_mem.bench.{name}")
    settings = benchmark.QUICK if quick else benchmark.Settings()
    settings = dataclasses.replace(settings, **changes)
    report = make_report(name, benchmark.run(settings))
    if json_path is not None:
        write_report(report, json_path)
    if figure is not None:
        from trae_mem.bench.figures import draw

        draw(report, figure)
    console.print(benchmark.table(report))
    print_checks(console, report)
    for label, path in (("results", json_path), ("figure", figure)):
        if path is not None and path != "-":
            console.print(f"{label}: {path}", markup=False, highlight=False, soft_wrap=True)
    if not all_reached(report):
        raise typer.Exit(1)


def _check_folder(path: str | Path | None) -> None:
    """A benchmark takes minutes: find out first whether its results can be written."""
    if path is not None and path != "-" and not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"'{path}': there is no folder '{Path(path).absolute().parent}'")
