"""Overlap of loads and compute on `device="cuda"`, simulated or real: what is measured, and how.

As in overlap.py a model is trained all resident and streamed, in turns; compute is the resident
model's step, transfer is the time that a step's loads take through the same engine with nothing
computed in between, and `efficiency = max(compute, transfer) / step`. Every time is taken on the
host around a step that ends with a synchronisation, as a user would take it; how compute splits
into forward and backward is told by events on the stream.

This module needs torch only: `make gpu-check` uses it too.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import trae_mem
from trae_mem.bench.harness import spread
from trae_mem.bench.large_models import LargeLlama
from trae_mem.bench.plain_llama import PlainLlama, build, fill, tokens
from trae_mem.bench.schedule import ideal_step_seconds
from trae_mem.native import load_native
from trae_mem.runtime import Runtime, find_runtime

CHECKED_PREFETCH = 2


@dataclass(frozen=True)
class Workload:
    """What is trained: one micro-step and one optimizer step a step."""

    shape: LargeLlama
    batch: int
    length: int  # tokens
    checkpointing: str = "none"
    rank: int = 8
    dtype: str = "bfloat16"
    empty: bool = False  # weights are reserved and never filled: for the simulated GPU

    @property
    def tokens(self) -> int:
        """In a step."""
        return self.batch * self.length


class Trainee:
    """A model in training; all that are compared see the same tokens in the same order."""

    def __init__(self, model: PlainLlama, workload: Workload) -> None:
        self.model = model
        self.losses: list[float] = []
        self.split: list[dict[str, float]] = []  # of each step, by the stream's own clock
        self.workload = workload
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-3)

    def step(self) -> float:
        """Trains one step; seconds."""
        work = self.workload
        ids = tokens(len(self.losses), work.batch, work.length, work.shape.vocabulary, "cuda")
        self._optimizer.zero_grad()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        marks = [_mark()]
        loss = self.model(ids)
        marks.append(_mark())
        loss.backward()
        marks.append(_mark())
        self._optimizer.step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        self.losses.append(loss.item())
        forward, backward = (a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks))
        rest = max(0.0, seconds - forward - backward)
        self.split.append({"forward": forward, "backward": backward, "rest": rest})
        return seconds


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class Contender(Trainee):
    """A streamed model, and what was measured of it."""

    def __init__(self, model: PlainLlama, workload: Workload, prefetch: int) -> None:
        source = "empty" if workload.empty else "ram"
        trae_mem.enable(model, prefetch=prefetch, device="cuda", source=source)
        super().__init__(model, workload)
        runtime = find_runtime(model)
        assert runtime is not None
        self.runtime: Runtime = runtime
        self.prefetch = prefetch
        self.rounds: list[dict[str, float]] = []
        self.odd_steps = 0  # steps with another number of loads than there should be

    @property
    def expected_loads(self) -> int:
        """Of a step: at each turn-around the units in slots are used again."""
        units = len(self.runtime.packs)
        return 2 * (units - min(self.runtime.slots, units))

    def measured_step(self) -> float:
        """Trains one step; seconds. Counts its loads."""
        before = trae_mem.status(self.model).loads
        seconds = self.step()
        self.odd_steps += trae_mem.status(self.model).loads - before != self.expected_loads
        return seconds

    def seconds_per_load(self) -> float:
        """The loads of one step through the same engine and link, with no compute in between."""
        engine, travel = self.runtime.streamer, load_native().Travel
        stream = torch.cuda.current_stream().cuda_stream
        units = range(len(self.runtime.packs))
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for order, direction in ((units, travel.FORWARD), (units[::-1], travel.BACKWARD)):
            for unit in order:
                engine.acquire(unit, stream, direction)
                engine.release(unit, stream)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / max(1, self.expected_loads)

    def forget(self) -> None:
        """Begins a new point."""
        self.rounds, self.odd_steps = [], 0


def make_resident(workload: Workload) -> Trainee:
    """The model with all its weights on the GPU."""
    model = _build(workload, "cuda")
    return Trainee(model if workload.empty else fill(model, alike=True), workload)


def make_contender(workload: Workload, prefetch: int) -> Contender:
    """The same model, streaming."""
    model = _build(workload, "meta" if workload.empty else "cpu")
    return Contender(model if workload.empty else fill(model, alike=True), workload, prefetch)


def _build(workload: Workload, device: str) -> PlainLlama:
    return build(
        workload.shape,
        getattr(torch, workload.dtype),
        device,
        rank=workload.rank,
        checkpointing=workload.checkpointing,
    )


def unit_bytes(contender: Contender) -> int:
    """Of the largest pack: what a load copies."""
    return max(pack.bytes for pack in contender.runtime.packs)


def at_link_speeds(
    workload: Workload,
    ratios: tuple[float, ...],
    prefetches: tuple[int, ...],
    *,
    rounds: int,
    rounds_beside: int,
    calibration_steps: int,
    set_link: Callable[[float], None],
) -> dict[str, Any]:
    """Measures every prefetch at links that need ``ratio`` times the compute's time.

    Args:
        workload: what is trained.
        ratios: transfer / compute.
        prefetches: each of them has a model of its own.
        rounds: of the checked prefetch; ``rounds_beside`` of the others.
        calibration_steps: of the resident model, before each link speed is chosen.
        set_link: sets the link's speed, in bytes/s.
    """
    resident = make_resident(workload)
    contenders = [make_contender(workload, prefetch) for prefetch in prefetches]
    clock = next((c for c in contenders if c.prefetch == CHECKED_PREFETCH), contenders[-1])
    resident.step()  # warm-up: memory is taken, libraries are loaded
    points = []
    for ratio in ratios:
        compute = statistics.median(resident.step() for _ in range(calibration_steps))
        link = unit_bytes(clock) * clock.expected_loads / (ratio * compute)
        set_link(link)
        for contender in contenders:
            contender.forget()
            contender.step()  # fills its slots
        for number in range(rounds):
            turns = contenders if number < rounds_beside else [clock]
            _round(resident, turns[:: -1 if number % 2 else 1], clock)
        points += [_point(contender, ratio, link) for contender in contenders]
    return {"points": points, "unit_bytes": unit_bytes(clock)}


def at_token_counts(
    workload: Workload,
    sizes: tuple[tuple[int, int], ...],
    prefetch: int,
    *,
    rounds: int,
    seconds: float = float("inf"),
) -> dict[str, Any]:
    """Measures one prefetch on the link that there is, with more and more tokens to a step.

    Args:
        workload: what is trained.
        sizes: batch and length of each point, in place of the workload's.
        prefetch: as in ``trae_mem.enable``.
        rounds: of each point.
        seconds: no point is begun when so many have gone by.
    """
    begin = time.monotonic()
    points: list[dict[str, Any]] = []
    resident, contender = make_resident(workload), make_contender(workload, prefetch)
    for batch, length in sizes:
        if points and time.monotonic() - begin > seconds:
            break
        for trainee in (resident, contender):
            trainee.workload = dataclasses.replace(workload, batch=batch, length=length)
            trainee.step()  # warm-up: memory is taken, slots are filled
        contender.forget()
        for _ in range(rounds):
            _round(resident, [contender], contender)
        ratio = statistics.median(one["transfer_over_compute"] for one in contender.rounds)
        load = statistics.median(one["seconds_per_load"] for one in contender.rounds)
        points.append(_point(contender, round(ratio, 2), unit_bytes(contender) / load))
        while len(contender.losses) < len(resident.losses):
            contender.step()  # the resident model takes one step more in each round
    differing = sum(map(operator.ne, contender.losses, resident.losses))
    return {"points": points, "steps_with_other_loss": differing}


def _round(resident: Trainee, turns: list[Contender], clock: Contender) -> None:
    """Each contender's step between two of the resident model: A B A C A."""
    seconds_per_load = clock.seconds_per_load()
    before = resident.step()
    for contender in turns:
        step = contender.measured_step()
        after = resident.step()
        split = resident.split[-1]
        compute = (before + after) / 2
        contender.rounds.append(_figures(contender, compute, step, split, seconds_per_load))
        before = after


def _figures(
    contender: Contender, compute: float, step: float, split: dict[str, float], load: float
) -> dict[str, float]:
    """One streamed step; ``compute`` is that of the resident steps before and after it."""
    units = len(contender.runtime.packs)
    transfer = load * contender.expected_loads
    ideal = split["rest"] + ideal_step_seconds(
        [split["forward"] / units] * units,
        [split["backward"] / units] * units,
        load,
        slots=contender.runtime.slots,
        prefetch=contender.prefetch,
        host_runs_ahead=True,
    )
    return {
        "compute_seconds": compute,
        "transfer_seconds": transfer,
        "step_seconds": step,
        "forward_seconds": split["forward"],
        "backward_seconds": split["backward"],
        "seconds_per_load": load,
        "efficiency": max(compute, transfer) / step,
        "efficiency_of_ideal_engine": max(compute, transfer) / ideal,
        "step_over_ideal_engine": step / ideal,
        "step_over_resident": step / compute,
        "transfer_over_compute": transfer / compute,
    }


def _point(contender: Contender, ratio: float, link: float) -> dict[str, Any]:
    rounds, work = contender.rounds, contender.workload
    return {
        "ratio": ratio,
        "tokens": work.tokens,
        "prefetch": contender.prefetch,
        "slots": contender.runtime.slots,
        "link_bytes_per_second": link,
        "nominal_seconds_per_load": unit_bytes(contender) / link,
        "loads_per_step": contender.expected_loads,
        "steps_with_other_loads": contender.odd_steps,
        **{key: spread([measured[key] for measured in rounds]) for key in rounds[0]},
        "rounds": rounds,
    }
