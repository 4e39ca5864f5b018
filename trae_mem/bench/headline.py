"""What fits on a card: Llama models of 7B to 70B, LoRA, with and without us, on a simulated GPU.

Each run trains transformers' and PEFT's own modules on an empty GPU that the dry mode of
`trae_mem.sim` plays: the host's code, the driver's calls and every allocation are those of
a real card; only kernels compute nothing. So memory is measured, speed is not, and losses say
nothing (that they are right is shown by the parity tests).

Counted is the card's memory as a whole: torch's reserved memory, our slots, and whatever else is
allocated. Not counted, because the simulated card does not have it: what a CUDA context takes by
itself, some 0.3 to 0.5 GiB on a real card.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich import box
from rich.table import Table

from trae_mem.bench.child import Child
from trae_mem.bench.harness import Outcome, Report, at_least, at_most
from trae_mem.bench.large_models import (
    CODE_LLAMA_34B,
    LLAMA_2_7B,
    LLAMA_2_13B,
    LLAMA_2_70B,
    LargeLlama,
)
from trae_mem.gpus import find_gpu
from trae_mem.report.summary import Check

_GIB = 1 << 30
STREAMED_BOUND = 8 * _GIB  # bytes of the card, for the headline's model


@dataclass(frozen=True)
class Settings:
    """What is trained; a step is ``accumulation`` micro-steps of ``batch`` sequences."""

    gpu: str = "A10"
    headline: LargeLlama = LLAMA_2_7B
    larger: tuple[LargeLlama, ...] = (LLAMA_2_13B, CODE_LLAMA_34B, LLAMA_2_70B)
    dtypes: tuple[str, ...] = ("bfloat16", "float16")  # of the headline; the others: the first
    full_batch: int = 8
    batch: int = 2
    accumulation: int = 4
    length: int = 2048  # tokens
    prefetch: int = 2
    rank: int = 8
    steps: int = 100  # of the headline
    steps_of_larger: int = 3
    search: bool = True  # for the smallest card
    threads: int = 1


# Fewer steps; the same shapes, since nothing is computed.
QUICK = Settings(
    dtypes=("bfloat16",), larger=(LLAMA_2_70B,), steps=4, steps_of_larger=2, search=False
)


@dataclass(frozen=True)
class Run:
    """One training run."""

    role: str  # "out of memory": asked for; "streams": asked for; "beside": to compare with
    shape: LargeLlama
    dtype: str
    batch: int
    accumulation: int
    steps: int
    checkpointing: bool
    streaming: bool


def run(settings: Settings) -> Outcome:
    """Trains all of it."""
    card = find_gpu(settings.gpu).memory_bytes
    with simulated_card(settings) as child:
        rows = [measure(child, one, card, settings) for one in _runs(settings)]
        smallest = _smallest_cards(child, rows, settings) if settings.search else []
    results = {"card_bytes": card, "runs": rows, "smallest": smallest}
    checks = _checks(rows, settings)
    return Outcome(asdict(settings), results, checks, simulated=settings.gpu)


def simulated_card(settings: Settings) -> Child:
    """The process that trains."""
    return Child(
        "trae_mem.bench.dry_training:DryTraining",
        {},
        threads=settings.threads,
        simulated=("--gpu", settings.gpu, "--mode", "dry"),
    )


def _runs(settings: Settings) -> list[Run]:
    model, few, dtype = settings.headline, settings.steps_of_larger, settings.dtypes[0]
    full, small = (settings.full_batch, 1), (settings.batch, settings.accumulation)
    found = []
    for each in settings.dtypes:
        found += [
            Run("out of memory", model, each, *full, 1, checkpointing=False, streaming=False),
            Run("streams", model, each, *small, settings.steps, checkpointing=True, streaming=True),
        ]
    found += [  # what else one could do, so that nobody has to ask
        Run("beside", model, dtype, *full, few, checkpointing=True, streaming=False),
        Run("beside", model, dtype, *small, few, checkpointing=True, streaming=False),
        Run("beside", model, dtype, *full, few, checkpointing=True, streaming=True),
    ]
    for larger in settings.larger:
        found += [
            Run("beside", larger, dtype, *small, 1, checkpointing=True, streaming=False),
            Run("streams", larger, dtype, *small, few, checkpointing=True, streaming=True),
        ]
    return found


def _train(child: Child, one: Run, memory: int, settings: Settings) -> dict[str, Any]:
    found: dict[str, Any] = child.ask(
        "run",
        shape=asdict(one.shape),
        dtype=one.dtype,
        rank=settings.rank,
        checkpointing=one.checkpointing,
        prefetch=settings.prefetch if one.streaming else None,
        memory_bytes=memory,
        batch=one.batch,
        length=settings.length,
        accumulation=one.accumulation,
        steps=one.steps,
    )
    return found


def measure(child: Child, one: Run, memory: int, settings: Settings) -> dict[str, Any]:
    """One run on a card of so many bytes, as it stands in the report."""
    found = _train(child, one, memory, settings)
    keys = ("allocated_bytes", "reserved_bytes", "device_bytes")
    measured = [*found["steps"], found["peak"]]
    return {
        "model": one.shape.name,
        "weight_bytes": one.shape.weight_bytes(getattr(torch, one.dtype)),
        **{key: value for key, value in asdict(one).items() if key != "shape"},
        "steps_done": len(found["steps"]),
        "out_of_memory": found["out_of_memory"],
        "streaming_status": found["streaming"],
        "card_bytes": found["card_bytes"],
        "peak": {key: max(step[key] for step in measured) for key in keys},
        "growth_bytes": _growth([step["device_bytes"] for step in found["steps"]]),
        "per_step": found["steps"],
    }


def _growth(peaks: list[float]) -> float:
    """By how much any step's peak exceeds the second step's: no spike later on."""
    return max(peaks[1:]) - peaks[1] if len(peaks) > 1 else 0


def _smallest_cards(
    child: Child, rows: list[dict[str, Any]], settings: Settings
) -> list[dict[str, Any]]:
    """For each model that streams, the smallest card in whole GiB on which it still trains.

    torch gives unused memory back before it fails, so a run may fit on less than it takes where
    there is plenty. It cannot fit on less than was in use at a time: the search begins there, and
    goes up until a run succeeds.
    """
    found = []
    for model in (settings.headline, *settings.larger):
        row = next(r for r in rows if r["role"] == "streams" and r["model"] == model.name)
        slots = row["peak"]["device_bytes"] - row["peak"]["reserved_bytes"]
        least = math.ceil((row["peak"]["allocated_bytes"] + slots) / _GIB)
        most = math.ceil(row["peak"]["device_bytes"] / _GIB)
        size = (settings.batch, settings.accumulation, settings.steps_of_larger)
        one = Run("streams", model, row["dtype"], *size, checkpointing=True, streaming=True)
        fits = (
            gib
            for gib in range(least, most + 1)
            if _train(child, one, gib * _GIB, settings)["out_of_memory"] is None
        )
        found.append({"model": model.name, "gib": next(fits, None)})
    return found


def _checks(rows: list[dict[str, Any]], settings: Settings) -> list[Check]:
    found = []
    for row in rows:
        label = f"{row['model']} {row['dtype']}, batch {row['batch']} x {row['accumulation']}"
        if row["role"] == "out of memory":
            ended = float(row["out_of_memory"] is not None)
            found.append(at_least(f"{label}, all resident: runs out of memory", ended, 1))
        elif row["role"] == "streams":
            found += _checks_of_streaming(row, label, settings)
    return found


def _checks_of_streaming(row: dict[str, Any], label: str, settings: Settings) -> list[Check]:
    found = [
        at_least(f"{label}, streaming: steps", row["steps_done"], row["steps"]),
        at_most(f"{label}, streaming: growth after step 2", row["growth_bytes"], 0, "bytes"),
    ]
    if row["model"] == settings.headline.name:
        used = row["peak"]["device_bytes"] / _GIB
        bound = STREAMED_BOUND / _GIB
        found.append(at_most(f"{label}, streaming: peak memory of the card", used, bound, "GiB"))
    status = row["streaming_status"]
    if status is not None:
        # Into empty slots once, then what is not in a slot at each of a micro-step's two turns.
        turns = 2 * row["steps"] * row["accumulation"]
        expected = status["slots"] + turns * (status["units"] - status["slots"])
        wrong = abs(status["loads"] - expected)
        found.append(at_most(f"{label}, streaming: loads too many or too few", wrong, 0))
    return found


def table(report: Report) -> Table:
    """A row for each run."""
    results, settings = report["results"], report["settings"]
    smallest = {row["model"]: row["gib"] for row in results["smallest"]}
    shown = Table(
        title=f"LoRA training, {settings['length']} tokens a sequence, on a simulated "
        f"{settings['gpu']} of {results['card_bytes'] / _GIB:.0f} GiB",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="peaks in GiB: torch's allocated and reserved memory, and the card as a whole, "
        "our slots counted (without a CUDA context's own 0.3 to 0.5). fits: the smallest card, "
        "in whole GiB, with the same settings.",
        caption_justify="left",
    )
    columns = ("model", "weights", "batch", "check-\npoints", "steps")
    for column in (*columns, "allo-\ncated", "re-\nserved", "card", "fits\nGiB"):
        justify: Any = "left" if column in ("model", "weights") else "right"
        shown.add_column(column, justify=justify, no_wrap=True)
    for row in results["runs"]:
        peak = row["peak"]
        done = str(row["steps_done"]) if row["out_of_memory"] is None else "out of memory"
        searched = row["role"] == "streams" and row["dtype"] == settings["dtypes"][0]
        shown.add_row(
            f"{row['model'].rpartition('-')[2]} {_SHORT[row['dtype']]}",
            "stream" if row["streaming"] else "resident",
            f"{row['batch']} x {row['accumulation']}",
            "yes" if row["checkpointing"] else "no",
            done,
            *(
                f"{peak[key] / _GIB:.2f}"
                for key in ("allocated_bytes", "reserved_bytes", "device_bytes")
            ),
            str(smallest[row["model"]]) if searched and smallest else "",
        )
    return shown


_SHORT = {"bfloat16": "bf16", "float16": "fp16"}
