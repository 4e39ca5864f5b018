"""What our hooks cost the host, for each unit and pass.

A model of blocks that do almost nothing and hold as many frozen parameters as a Llama block,
with and without us, in turns. There is a slot for every unit, so no load is waited for and
nothing is copied: what is left is the hooks, the engine's bookkeeping and the events.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

import trae_mem
from trae_mem.bench.harness import Outcome, Report, at_most, measuring, spread

HOST_BOUND = 30.0  # microseconds for each unit and pass
PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    units: int = 16  # few: a step that is short is seldom disturbed
    frozen_parameters: int = 9  # a Llama block has nine
    warm_up: int = 50  # steps
    repeats: int = 3000  # steps of each model
    threads: int = 1


QUICK = Settings(repeats=300)


class EmptyBlock(nn.Module):
    """Scales its input by one trained number; the frozen parameters are only held."""

    def __init__(self, frozen: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.ParameterList(
            nn.Parameter(torch.zeros(16), requires_grad=False) for _ in range(frozen)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden``, scaled."""
        return hidden * self.scale


class EmptyModel(nn.Module):
    """A list of empty blocks."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            EmptyBlock(settings.frozen_parameters) for _ in range(settings.units)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Through all blocks."""
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def run(settings: Settings) -> Outcome:
    """Measures both passes with and without us."""
    with measuring(settings.threads):
        return _run(settings)


def _run(settings: Settings) -> Outcome:
    plain, streamed = EmptyModel(settings), EmptyModel(settings)
    trae_mem.enable(streamed, slots=settings.units, source="ram")
    for _ in range(settings.warm_up):
        _step(plain)
        _step(streamed)
    before = trae_mem.status(streamed)
    added: dict[str, list[float]] = {name: [] for name in PASSES}
    bare: dict[str, list[float]] = {name: [] for name in PASSES}
    for number in range(settings.repeats):
        order = (plain, streamed) if number % 2 == 0 else (streamed, plain)
        times = {model: _step(model) for model in order}
        for index, name in enumerate(PASSES):
            without, ours = times[plain][index], times[streamed][index]
            bare[name].append(1e6 * without / settings.units)
            added[name].append(1e6 * (ours - without) / settings.units)
    after = trae_mem.status(streamed)
    both = [statistics.fmean(pair) for pair in zip(*added.values(), strict=True)]
    results = {
        "added_microseconds": {
            **{name: spread(added[name]) for name in PASSES},
            "mean": spread(both),
        },
        "empty_block_microseconds": {name: spread(bare[name]) for name in PASSES},
        "acquires": after.acquires - before.acquires,
        "hits": after.hits - before.hits,
        "loads": after.loads - before.loads,
    }
    trae_mem.disable(streamed)
    return Outcome(asdict(settings), results, _checks(results, settings, plain, streamed))


def _step(model: nn.Module) -> tuple[float, float]:
    """Seconds forward and backward."""
    hidden = torch.ones(16)
    begin = time.perf_counter()
    output = model(hidden)
    middle = time.perf_counter()
    output.backward(hidden)
    return middle - begin, time.perf_counter() - middle


def _checks(
    results: dict[str, Any], settings: Settings, plain: nn.Module, streamed: nn.Module
) -> list[Any]:
    def gradients(model: nn.Module) -> list[Tensor]:
        return [p.grad for p in model.parameters() if p.grad is not None]

    differing = sum(
        not torch.equal(ours, theirs)
        for ours, theirs in zip(gradients(streamed), gradients(plain), strict=True)
    )
    expected = 2 * settings.units * settings.repeats  # both passes acquire every unit
    return [
        *(
            at_most(
                f"host cost {name}, per unit and pass",
                results["added_microseconds"][name]["median"],
                HOST_BOUND,
                "us",
            )
            for name in (*PASSES, "mean")
        ),
        at_most("gradients that differ from the plain model", differing, 0),
        at_most("acquires too many or too few", abs(expected - results["acquires"]), 0),
        at_most("loads", results["loads"], 0),
    ]


def table(report: Report) -> Table:
    """Microseconds for each unit and pass."""
    results = report["results"]
    shown = Table(
        title="Host cost of our hooks, microseconds for each unit and pass", title_justify="left"
    )
    for column in ("pass", "empty block", "added (median)", "quartiles"):
        shown.add_column(column, justify="right")
    for name in (*PASSES, "mean"):
        found = results["added_microseconds"][name]
        block = results["empty_block_microseconds"].get(name)
        shown.add_row(
            name,
            "" if block is None else f"{block['median']:.1f}",
            f"{found['median']:.1f}",
            f"{found['q1']:.1f} - {found['q3']:.1f}",
        )
    return shown
