"""`trae-mem bench overlap --device cuda`: how well loads hide behind compute on a GPU.

With `--sim CARD` the GPU is simulated, in dry mode with the card's pace: kernels compute nothing
and take the time that a roofline of the card's FLOP/s and bandwidth gives them, copies take bytes /
link, and the host's code, streams and events are real. Shapes are so large that a layer's time on
the card is many times what the host needs for it, as on a real one. The card's memory alone is not
the card's: it is made as large as the all-resident model needs to be compared with, which enters
no time.

Without `--sim` the GPU is real, its link is what it is, and the tokens of a step decide on which
side of break-even it lies.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from trae_mem.bench import overlap
from trae_mem.bench.child import Child
from trae_mem.bench.harness import Outcome, Report, at_least, at_most
from trae_mem.bench.large_models import LargeLlama
from trae_mem.bench.overlap_gpu import (
    CHECKED_PREFETCH,
    Workload,
    at_link_speeds,
    at_token_counts,
)
from trae_mem.errors import ConfigError
from trae_mem.gpus import find_gpu
from trae_mem.report.summary import Check

EFFICIENCY_BOUND = overlap.EFFICIENCY_BOUND
_GIB = 1 << 30


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    gpu: str | None = "A10"  # that is simulated; None: the real one
    # Layers of Llama-2-7B, twice as many of them: at each turn-around the link waits until slots
    # are free, and what that costs falls with depth (the 70B model has 80). The vocabulary is
    # small, since what is streamed are the layers.
    shape: LargeLlama = field(
        default_factory=lambda: LargeLlama("layers of Llama-2-7B", 64, 4096, 11008, 32, 32, 256)
    )
    batch: int = 2
    length: int = 2048  # tokens
    ratios: tuple[float, ...] = (0.5, 1.0, 2.0)  # transfer / compute
    prefetches: tuple[int, ...] = (0, 1, 2, 4)
    rounds: int = 5
    rounds_beside: int = 2  # of the prefetches that are there to compare with
    calibration_steps: int = 2
    simulated_memory: int = 1024 * _GIB  # see the head of the file
    threads: int = 1
    # On a real GPU:
    real_layers: int = 32
    real_sizes: tuple[tuple[int, int], ...] = ((1, 1024), (2, 2048), (8, 2048))


QUICK = Settings(rounds=3, rounds_beside=1)


class Measurement:
    """Runs in the child, on the simulated GPU."""

    def __init__(self, shape: dict[str, Any], batch: int, length: int) -> None:
        self._workload = Workload(LargeLlama(**shape), batch, length, empty=True)

    def run(
        self,
        ratios: list[float],
        prefetches: list[int],
        rounds: int,
        rounds_beside: int,
        calibration_steps: int,
    ) -> dict[str, Any]:
        """Every prefetch at every link speed."""
        from trae_mem.sim import control

        return at_link_speeds(
            self._workload,
            tuple(ratios),
            tuple(prefetches),
            rounds=rounds,
            rounds_beside=rounds_beside,
            calibration_steps=calibration_steps,
            set_link=control.set_link,
        )


def run(settings: Settings) -> Outcome:
    """Measures on the simulated GPU, or on the real one."""
    if settings.gpu is None:
        return _on_real_gpu(settings)
    find_gpu(settings.gpu)
    options = ("--gpu", settings.gpu, "--mode", "dry", "--pace")
    with Child(
        f"{__name__}:Measurement",
        {"shape": asdict(settings.shape), "batch": settings.batch, "length": settings.length},
        threads=settings.threads,
        simulated=(*options, "--memory", str(settings.simulated_memory)),
    ) as child:
        results = child.ask(
            "run",
            ratios=settings.ratios,
            prefetches=settings.prefetches,
            rounds=settings.rounds,
            rounds_beside=settings.rounds_beside,
            calibration_steps=settings.calibration_steps,
        )
    checks = [
        at_least(
            f"efficiency at {point['ratio']:g} x compute, prefetch {CHECKED_PREFETCH}",
            point["efficiency"]["median"],
            EFFICIENCY_BOUND,
        )
        for point in results["points"]
        if point["prefetch"] == CHECKED_PREFETCH
    ]
    checks.append(_load_check(results))
    return Outcome(asdict(settings), results, checks, simulated=settings.gpu)


def _on_real_gpu(settings: Settings) -> Outcome:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "bench overlap --device cuda: torch sees no GPU here. Add --sim A10 to simulate one, "
            "or use --device cpu"
        )
    shape = LargeLlama(**{**asdict(settings.shape), "layers": settings.real_layers})
    workload = Workload(shape, settings.batch, settings.length, checkpointing="non-reentrant")
    results = at_token_counts(
        workload, settings.real_sizes, CHECKED_PREFETCH, rounds=settings.rounds
    )
    checks = [
        at_least(f"efficiency at {point['tokens']} tokens", point["efficiency"]["median"], 0.95)
        for point in results["points"]
    ]
    differing = results["steps_with_other_loss"]
    checks.append(at_most("steps whose loss differs from all resident", differing, 0))
    checks.append(_load_check(results))
    return Outcome({**asdict(settings), "shape": asdict(shape)}, results, checks, device="cuda")


def _load_check(results: dict[str, Any]) -> Check:
    wrong = sum(point["steps_with_other_loads"] for point in results["points"])
    return at_most("steps with other than 2 x (units - slots) loads", wrong, 0)


def table(report: Report) -> Table:
    """As on the CPU, a row for each link speed and prefetch; or for each number of tokens."""
    shown = overlap.table(report)
    if simulated := report["settings"]["gpu"]:
        shown.title = f"{shown.title}, simulated {simulated}"
    shown.caption = (
        f"{shown.caption} The host runs ahead of a GPU, so that loads overlap with compute "
        "even without prefetch, in two slots."
    )
    return shown
