"""What is noted of every optimizer step: loss, time, tokens, and what streaming did meanwhile."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from trae_mem.report.summary import StepRecord


class StepLossTrainer(Trainer):
    """A Trainer that keeps each step's loss in full precision, and leaves a streamed model alone.

    Trainer's own log rounds the loss to four digits, which is too coarse to compare two runs.
    """

    def __init__(self, *args: Any, streamed: bool, **options: Any) -> None:
        self._streamed = streamed  # before super(), which already wants to move the model
        self._losses: list[torch.Tensor] = []  # of the micro-steps since the last step
        self._tokens = 0
        super().__init__(*args, **options)

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        # Where a streamed model's weights are is the runtime's business alone.
        if not self._streamed:
            super()._move_model_to_device(model, device)

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **options: Any
    ) -> torch.Tensor:
        self._tokens += inputs["input_ids"].numel()
        loss: torch.Tensor = super().training_step(model, inputs, *args, **options)
        self._losses.append(loss.detach())
        return loss

    def take_step(self) -> tuple[float, int]:
        """(loss, tokens) of the micro-steps since the last call; their losses are shares of one."""
        loss = sum(float(part) for part in self._losses)
        tokens = self._tokens
        self._losses, self._tokens = [], 0
        return loss, tokens


@dataclass
class Counters:
    """The parts of `trae_mem.Status` that a step is charged with."""

    stall_seconds: float = 0.0
    loads: int = 0
    bytes_on_device: int = 0


class StepRecorder(TrainerCallback):
    """Makes a StepRecord of every optimizer step and hands it to the `listeners`.

    Args:
        counters: Reads the streaming counters as they stand now; all zero when nothing streams.
    """

    def __init__(self, counters: Callable[[], Counters]) -> None:
        self.trainer: StepLossTrainer | None = None  # set once the trainer exists
        self.records: list[StepRecord] = []
        self.listeners: list[Callable[[StepRecord], None]] = []
        self._counters = counters
        self._before = Counters()
        self._begin_ns = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._before = dataclasses.replace(self._counters())
        self._begin_ns = time.monotonic_ns()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.trainer is not None
        loss, tokens = self.trainer.take_step()  # reading the loss waits for the device
        end_ns = time.monotonic_ns()
        now = self._counters()
        record = StepRecord(
            step=state.global_step,
            loss=loss,
            seconds=(end_ns - self._begin_ns) / 1e9,
            tokens=tokens,
            begin_ns=self._begin_ns,
            end_ns=end_ns,
            stall_seconds=now.stall_seconds - self._before.stall_seconds,
            loads=now.loads - self._before.loads,
            bytes_on_device=now.bytes_on_device,
        )
        self.records.append(record)
        for listener in self.listeners:
            listener(record)
