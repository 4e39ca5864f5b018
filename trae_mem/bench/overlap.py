"""How well loads hide behind compute, at links that are quick, just right, and too slow.

A Llama-shaped model is trained with LoRA, all resident and streamed over a throttled link, in
turns. Two times bound a step from below: its compute, which is the resident model's step time,
and its transfer, which is the time that the same loads take over the same link when nothing is
computed. `efficiency = max(compute, transfer) / step time`.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import nn

import trae_mem
from trae_mem.bench.harness import Outcome, Report, at_least, at_most, measuring, spread
from trae_mem.bench.models import (
    LlamaShape,
    add_adapters,
    digest,
    loss_of,
    random_llama,
    tokens,
    trainable,
)
from trae_mem.bench.schedule import ideal_step_seconds
from trae_mem.native import load_native
from trae_mem.recorder import Event
from trae_mem.report.summary import Check
from trae_mem.runtime import Runtime, find_runtime

EFFICIENCY_BOUND = 0.95
CHECKED_PREFETCH = 2


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    # Many tokens to few weights, as on a GPU, where break-even lies at thousands of tokens: the
    # copies' own use of the cores and of the memory must not slow down compute.
    shape: LlamaShape = field(default_factory=lambda: LlamaShape(64, 192, 512))
    batch: int = 8
    length: int = 64  # tokens
    ratios: tuple[float, ...] = (0.5, 1.0, 2.0)  # transfer / compute
    prefetches: tuple[int, ...] = (0, 1, 2, 4)
    rounds: int = 7
    rounds_beside: int = 2  # of the prefetches that are there to compare with
    calibration_steps: int = 3
    # A GPU's compute leaves the cores to the copies; with one thread, so does ours.
    threads: int = 1


QUICK = Settings(shape=LlamaShape(48, 192, 512), batch=6, rounds=3, rounds_beside=1)


class Trainee:
    """A model in training; all that are compared see the same tokens in the same order."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.model = model
        self.losses: list[float] = []
        self.adapters: list[str] = []  # a digest of them after each step
        self._settings = settings
        self._optimizer = torch.optim.AdamW(trainable(model), lr=1e-3, fused=True)

    def step(self) -> float:
        """Trains one step; seconds."""
        shape, batch = self._settings.shape, self._settings.batch
        ids = tokens(len(self.losses), batch, self._settings.length, shape.vocabulary)
        self._optimizer.zero_grad()
        begin = time.perf_counter()
        loss = loss_of(self.model, ids)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        seconds = time.perf_counter() - begin
        self.losses.append(loss.item())
        self.adapters.append(digest(trainable(self.model)))
        return seconds


class Contender(Trainee):
    """A streamed model, and what was measured of it at the current link speed."""

    def __init__(self, model: nn.Module, settings: Settings, prefetch: int) -> None:
        super().__init__(model, settings)
        self.prefetch = prefetch
        self.runtime: Runtime
        self.rounds: list[dict[str, float]] = []
        self.loads: list[int] = []  # in each measured step
        self.stall_seconds = 0.0  # of the last measured step

    def connect(self, link_bytes_per_second: int) -> None:
        """Streams over a link of that speed from now on, and takes a step to fill the slots."""
        device = load_native().HostDevice(link_bytes_per_second=link_bytes_per_second)
        trae_mem.enable(self.model, prefetch=self.prefetch, device=device, source="ram")
        runtime = find_runtime(self.model)
        assert runtime is not None
        self.runtime, self.rounds, self.loads = runtime, [], []
        self.step()

    @property
    def expected_loads(self) -> int:
        """The loads of a step: at each turn-around the units in slots are used again."""
        return loads_of_step(len(self.runtime.packs), self.prefetch)

    def measured_step(self) -> tuple[float, list[float]]:
        """Trains one step; its seconds, and those that each use of a unit computed for."""
        with trae_mem.Recorder(self.model) as recorder:
            seconds = self.step()
            events = recorder.events()
        self.loads.append(sum(event.kind == "load" for event in events))
        stalls = [event.end_ns - event.begin_ns for event in events if event.kind == "stall"]
        self.stall_seconds = sum(stalls) / 1e9
        return seconds, compute_seconds_of_uses(events)

    def seconds_per_load(self) -> float:
        """The loads of one step through the same engine and link, with no compute in between."""
        engine, travel = self.runtime.streamer, load_native().Travel
        units = range(len(self.runtime.packs))
        begin = time.perf_counter()
        for order, direction in ((units, travel.FORWARD), (units[::-1], travel.BACKWARD)):
            for unit in order:
                engine.acquire(unit, 0, direction)
                engine.release(unit, 0)
        return (time.perf_counter() - begin) / self.expected_loads


def compute_seconds_of_uses(events: Sequence[Event]) -> list[float]:
    """Seconds from each acquire to the next, without the time that the next one waited.

    What lies between two uses, the loss for example, counts to the one before.
    """
    acquires = [event for event in events if event.kind == "acquire"]
    waited = {
        event.end_ns: event.end_ns - event.begin_ns for event in events if event.kind == "stall"
    }
    ends = [event.end_ns - waited.get(event.end_ns, 0) for event in acquires[1:]]
    ends.append(max(event.end_ns for event in events if event.kind == "release"))
    return [(end - use.end_ns) / 1e9 for use, end in zip(acquires, ends, strict=True)]


def loads_of_step(units: int, prefetch: int) -> int:
    """Loads of a training step with prefetch + 2 slots."""
    return 2 * (units - min(prefetch + 2, units))


def run(settings: Settings) -> Outcome:
    """Measures every prefetch at every link speed."""
    with measuring(settings.threads):
        return _run(settings)


def _run(settings: Settings) -> Outcome:
    model = add_adapters(random_llama(settings.shape, torch.float32))
    initial = [parameter.detach().clone() for parameter in trainable(model)]
    contenders = [Contender(copy.deepcopy(model), settings, n) for n in settings.prefetches]
    resident = Trainee(model, settings)
    points = []
    for ratio in settings.ratios:
        points += _at_ratio(ratio, resident, contenders, settings)
    results = {
        "points": points,
        "steps_compared": sum(len(contender.losses) for contender in contenders),
        "first_loss": resident.losses[0],
        "last_loss": resident.losses[-1],
    }
    unchanged = sum(map(torch.equal, initial, trainable(model)))
    return Outcome(asdict(settings), results, _checks(points, resident, contenders, unchanged))


def _at_ratio(
    ratio: float, resident: Trainee, contenders: list[Contender], settings: Settings
) -> list[dict[str, Any]]:
    """One link speed, every prefetch: in turns with the resident model, A B A C A D A."""
    calibration = [resident.step() for _ in range(settings.calibration_steps)]
    compute = statistics.median(calibration)
    link = _link_speed(ratio * compute, resident.model, settings)
    for contender in contenders:
        contender.connect(link)
    clock = next((c for c in contenders if c.prefetch == CHECKED_PREFETCH), contenders[-1])
    for number in range(settings.rounds):
        seconds_per_load = clock.seconds_per_load()
        before = resident.step()
        turns = contenders if number < settings.rounds_beside else [clock]
        for contender in turns[:: -1 if number % 2 else 1]:
            step, uses = contender.measured_step()
            after = resident.step()
            compute = (before + after) / 2
            contender.rounds.append(_round_of(contender, compute, step, uses, seconds_per_load))
            before = after
    points = [_point(ratio, link, contender) for contender in contenders]
    for contender in contenders:
        trae_mem.disable(contender.model)
    return points


def _link_speed(seconds: float, model: nn.Module, settings: Settings) -> int:
    """Bytes a second with which the loads of the checked prefetch take that long."""
    unit = sum(
        parameter.numel() * parameter.element_size()
        for name, parameter in model.named_parameters()
        if ".layers.0." in name and not parameter.requires_grad
    )
    return int(unit * loads_of_step(settings.shape.layers, CHECKED_PREFETCH) / seconds)


def _round_of(
    contender: Contender, compute: float, step: float, uses: list[float], load: float
) -> dict[str, float]:
    """One streamed step; `compute` is that of the resident steps before and after it."""
    units, prefetch = len(uses) // 2, contender.prefetch
    transfer = load * contender.expected_loads
    ideal = ideal_step_seconds(
        uses[:units], uses[units:], load, slots=contender.runtime.slots, prefetch=prefetch
    )
    ideal += step - contender.stall_seconds - sum(uses)  # the optimizer, and what lies outside
    return {
        "compute_seconds": compute,
        "transfer_seconds": transfer,
        "step_seconds": step,
        "forward_seconds": sum(uses[:units]),
        "backward_seconds": sum(uses[units:]),
        "seconds_per_load": load,
        "efficiency": max(compute, transfer) / step,
        "efficiency_of_ideal_engine": max(compute, transfer) / ideal,
        "step_over_ideal_engine": step / ideal,
        "step_over_resident": step / compute,
        "transfer_over_compute": transfer / compute,
    }


def _point(ratio: float, link: int, contender: Contender) -> dict[str, Any]:
    rounds = contender.rounds
    return {
        "ratio": ratio,
        "prefetch": contender.prefetch,
        "slots": contender.runtime.slots,
        "link_bytes_per_second": link,
        "nominal_seconds_per_load": max(pack.bytes for pack in contender.runtime.packs) / link,
        "loads_per_step": contender.expected_loads,
        "steps_with_other_loads": sum(n != contender.expected_loads for n in contender.loads),
        **{key: spread([measured[key] for measured in rounds]) for key in rounds[0]},
        "rounds": rounds,
    }


def _checks(
    points: list[dict[str, Any]], resident: Trainee, contenders: list[Contender], unchanged: int
) -> list[Check]:
    def differing(of: str) -> int:
        theirs: list[Any] = getattr(resident, of)
        return sum(
            ours != other
            for contender in contenders
            for ours, other in zip(getattr(contender, of), theirs, strict=False)
        )

    return [
        *(
            at_least(
                f"efficiency at {point['ratio']:g} x compute, prefetch {CHECKED_PREFETCH}",
                point["efficiency"]["median"],
                EFFICIENCY_BOUND,
            )
            for point in points
            if point["prefetch"] == CHECKED_PREFETCH
        ),
        at_most("steps whose loss differs from all resident", differing("losses"), 0),
        at_most("steps whose adapters differ from all resident", differing("adapters"), 0),
        at_most("adapter tensors that training left unchanged", unchanged, 0),
        at_most(
            "steps with other than 2 x (units - slots) loads",
            sum(point["steps_with_other_loads"] for point in points),
            0,
        ),
    ]


def table(report: Report) -> Table:
    """The results, a row for each link speed and prefetch."""
    shown = Table(
        title="Overlap of loads and compute (medians, seconds)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="link: transfer / compute as it was set. ideal: the efficiency of an engine that "
        "costs nothing, given the same computing times. Last: what ours costs beyond that.",
        caption_justify="left",
    )
    for column in (
        "link",
        "pre-\nfetch",
        "compute",
        "transfer",
        "step",
        "efficiency\n(quartiles)",
        "ideal",
        "step /\nideal",
    ):
        shown.add_column(column, justify="right", no_wrap=True)
    for point in report["results"]["points"]:
        efficiency = point["efficiency"]
        shown.add_row(
            f"{point['ratio']:g} x",
            str(point["prefetch"]),
            *(
                f"{point[key]['median']:.3f}"
                for key in ("compute_seconds", "transfer_seconds", "step_seconds")
            ),
            f"{efficiency['median']:.3f} ({efficiency['q1']:.2f}-{efficiency['q3']:.2f})",
            f"{point['efficiency_of_ideal_engine']['median']:.3f}",
            f"{point['step_over_ideal_engine']['median']:.3f}",
        )
    return shown
