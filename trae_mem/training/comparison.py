"""Streaming beside all resident: the same run twice, in two processes, in turns.

Each variant has a process of its own, so that each has a peak memory of its own, and both are
alive at once, so that their steps alternate (see `turns`). The results of the streaming run are
the results of the whole; the other one leaves its files in the folder `resident` beside them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

from trae_mem.config import RunConfig
from trae_mem.errors import ConfigError, TraeMemError
from trae_mem.report.summary import (
    RESIDENT,
    SUMMARY,
    Check,
    RunRecord,
    StepRecord,
    median_step_seconds,
)
from trae_mem.report.tables import mean_loss, print_line
from trae_mem.sizes import format_bytes
from trae_mem.training.channel import Channel, PeerGoneError
from trae_mem.training.models import resolve_checkpoint
from trae_mem.training.output import prepare_output
from trae_mem.training.progress import LiveLine

STEP_TIME_BOUND = 1.05  # streaming may cost this much of the step time
STOP_SECONDS = 60.0  # a variant that was interrupted may take this long to save its adapter


class VariantError(TraeMemError):
    """One of the two processes ended before its run did."""


class Variant:
    """One of the two training processes; ended, whatever happens, when its `with` block is left."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self.log = log
        self.steps: list[StepRecord] = []
        ours, theirs = socket.socketpair()
        # OpenMP threads that wait by spinning take the cores from all else that runs, the loads
        # included: on a shared machine a step then takes many times as long.
        environment = {"OMP_WAIT_POLICY": "passive"} | os.environ
        with theirs, log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, "--turns", str(theirs.fileno())],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C at a terminal reaches the referee alone, which passes it on in order.
                start_new_session=True,
            )
        self._channel = Channel(ours)

    def __enter__(self) -> Variant:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._channel.close()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def wait_ready(self) -> int:
        """Waits until everything is loaded; returns how many steps there will be."""
        return int(self._hear(self._channel.expect, "ready")["steps"])

    def turn(self) -> bool:
        """Lets it train one step, waits for the end of it; returns whether more follow."""
        self.let_go()
        message = self._hear(self._channel.expect, "step")
        self.steps.append(StepRecord(**message["record"]))
        return not message["last"]

    def let_go(self) -> None:
        """Gives it the turn without waiting for the end of it."""
        self._hear(self._channel.send, {"kind": "go"})

    def wait_end(self) -> None:
        """Waits until it has saved its results."""
        code = self._process.wait()
        if code != 0:
            raise self._error(code)

    def interrupt(self) -> None:
        """Passes on Ctrl-C, and waits until it has saved what it has."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(timeout=STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _hear(self, call: Any, argument: Any) -> Any:
        try:
            return call(argument)
        except PeerGoneError:
            try:
                code = self._process.wait(timeout=STOP_SECONDS)
            except subprocess.TimeoutExpired:
                code = None
            raise self._error(code) from None

    def _error(self, code: int | None) -> TraeMemError:
        tail = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-25:]
        if code == 2 and tail:  # the child has already said it well
            return ConfigError("\n".join(tail).removeprefix("trae-mem: "))
        how = f"was killed by signal {-code}" if code is not None and code < 0 else "ended"
        return VariantError(
            f"the {self.name} run {how} (exit code {code}); the end of {self.log}:\n"
            + "\n".join(tail)
        )


def run_comparison(
    path: str, overrides: Sequence[str], config: RunConfig, console: Console
) -> RunRecord:
    """Runs both variants and compares them.

    Args:
        path, overrides: What the configuration was read from; the child processes read it again.
        config: The configuration.
        console: Where the live line goes.

    Returns:
        The record of the streaming run, with its `comparison` and `checks`; also written to
        `summary.json`. Its outcome is "interrupted" after Ctrl-C.

    Raises:
        VariantError: One of the processes died; the other one was ended.
    """
    folder = prepare_output(config.output_dir)
    (folder / RESIDENT).mkdir()
    checkpoint = resolve_checkpoint(config.model.model, console)
    base = [sys.executable, "-m", "trae_mem.cli", "train", path, *overrides]
    base += ["compare_resident=false", f"model_config.model={json.dumps(str(checkpoint))}"]
    resident = f"output_dir={json.dumps(str(folder / RESIDENT))}"
    interrupted = False
    print_line(console, "two processes load the model: one streams its layers, one keeps them all")
    try:
        with (
            Variant("streaming", base, folder / "streaming.log") as ours,
            Variant(
                "all-resident",
                [*base, "model_config.enable_lazy_load=false", resident],
                folder / "resident.log",
            ) as theirs,
        ):
            try:
                _take_turns(ours, theirs, console)
            except KeyboardInterrupt:
                interrupted = True
                print_line(console, "interrupted: saving what was trained so far")
                for variant in (ours, theirs):
                    variant.interrupt()
    except OSError as error:
        raise VariantError(f"the processes cannot be started: {error}") from error
    if interrupted and not (folder / SUMMARY).exists():
        raise KeyboardInterrupt  # nothing was trained yet
    record = RunRecord.read(folder)
    record.config = config.as_dict()
    if interrupted:
        record.outcome = "interrupted"
    else:
        other = RunRecord.read(folder / RESIDENT)
        record.comparison = compare(record, other)
        record.checks = checks_of(record)
    record.write(folder)
    return record


def _take_turns(ours: Variant, theirs: Variant, console: Console) -> None:
    steps = ours.wait_ready()
    theirs.wait_ready()
    more = True
    with LiveLine(console, steps) as line:
        while more:
            # A B, B A, A B: what the first of a pair gains or loses evens out.
            pair = (ours, theirs) if len(ours.steps) % 2 == 0 else (theirs, ours)
            for variant in pair:
                more = variant.turn()
            line.show(len(ours.steps), _live_text(ours.steps[-1], theirs.steps[-1]))
    for variant in (ours, theirs):
        variant.let_go()
        variant.wait_end()


def _live_text(ours: StepRecord, theirs: StepRecord) -> str:
    same = "same loss" if ours.loss == theirs.loss else f"loss {theirs.loss:.4f}"
    return "  ".join(
        [
            f"loss {ours.loss:.4f}",
            f"{ours.tokens / ours.seconds:.0f} tokens/s",
            f"layers on device {format_bytes(ours.bytes_on_device)}",
            f"stall {100 * ours.stall_seconds / ours.seconds:.1f} %",
            f"| all resident: {same}",
            f"{theirs.tokens / theirs.seconds:.0f} tokens/s",
            f"{format_bytes(theirs.bytes_on_device)}",
        ]
    )


def compare(ours: RunRecord, theirs: RunRecord) -> dict[str, Any]:
    """The `comparison` of `summary.json`.

    The step time ratio is the median over pairs of steps, the first pair left out: a machine that
    slows down for a while slows both steps of a pair.
    """
    pairs = list(zip(ours.steps, theirs.steps, strict=True))
    ratios = [our.seconds / their.seconds for our, their in pairs[1:] or pairs]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    differing = [our.step for our, their in pairs if our.loss != their.loss]
    return {
        "streaming": _figures(ours),
        "resident": _figures(theirs),
        "step_time_ratio": statistics.median(ratios),
        "step_time_ratio_quartiles": [quartiles[0], quartiles[2]],
        "compared_steps": len(ratios),
        "losses_identical": not differing,
        "first_differing_step": differing[0] if differing else None,
    }


def _figures(record: RunRecord) -> dict[str, Any]:
    first, last = mean_loss(record.steps)
    layers = record.model["layers"]
    on_device = record.steps[-1].bytes_on_device
    share = 1.0 if record.status is None else on_device / record.status["total_bytes"]
    return {
        "layer_bytes_on_device": on_device,
        "layers": layers,
        "layers_on_device": round(layers * share, 1),  # slots are rounded up to their alignment
        "peak_rss_bytes": record.peak_rss_bytes,
        "median_step_seconds": median_step_seconds(record.steps),
        "stall_share": record.stall_share,
        "first_loss": record.losses[0],
        "last_loss": record.losses[-1],
        "mean_first_3": first,
        "mean_last_3": last,
    }


def checks_of(record: RunRecord) -> list[Check]:
    """What a comparison must show; see the bound of each."""
    comparison, status = record.comparison, record.status
    assert comparison is not None
    assert status is not None
    ours = comparison["streaming"]
    differing = 0 if comparison["losses_identical"] else 1
    limit = status["slots"] + status["resident_units"]
    fall = ours["mean_last_3"] - ours["mean_first_3"]
    ratio = comparison["step_time_ratio"]
    return [
        Check("losses differ from all resident, at most", differing, 0, "", differing == 0),
        Check("loss change, first to last 3 steps, below", fall, 0, "", fall < 0),
        Check(
            "layers on the device, at most",
            ours["layers_on_device"],
            limit,
            f"of {ours['layers']}",
            ours["layers_on_device"] <= limit,
        ),
        Check(
            "step time, streaming / resident, at most",
            round(ratio, 4),
            STEP_TIME_BOUND,
            "",
            ratio <= STEP_TIME_BOUND,
        ),
        Check(
            "bytes written back, at most",
            status["written_back_bytes"],
            0,
            "bytes",
            status["written_back_bytes"] == 0,
        ),
    ]
