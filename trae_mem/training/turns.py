"""Two processes that train step by step, in turns, so that their step times can be compared.

A machine is rarely equally quick for minutes on end. Steps of both variants that alternate see
the same machine, so the ratio of their times means something. A referee
(`comparison.Referee`) owns both processes and gives the turn to one of them at a time:

    child   {"kind": "ready", "steps": 18}                 loaded; waits for its first turn
    referee {"kind": "go"}
    child   {"kind": "step", "last": false, "record": …}   one step is done; waits again
    …
    child   {"kind": "step", "last": true, "record": …}    waits once more, then saves and ends

A turn ends where the next step would begin, so that evaluation and checkpoints of one variant
never run during a step of the other.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from transformers import TrainerCallback

from trae_mem.training.channel import Channel
from trae_mem.training.steps import StepRecorder


class TurnTaker(TrainerCallback):
    """The child's side. Must stand before the StepRecorder, which times the step alone."""

    def __init__(self, channel: Channel, recorder: StepRecorder) -> None:
        self._channel = channel
        self._recorder = recorder
        self._reported = 0  # records that the referee has

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._channel.send({"kind": "ready", "steps": state.max_steps})
        self._channel.expect("go")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if len(self._recorder.records) > self._reported:
            self._report(last=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._report(last=True)

    def _report(self, *, last: bool) -> None:
        self._reported = len(self._recorder.records)
        record = asdict(self._recorder.records[-1])
        self._channel.send({"kind": "step", "last": last, "record": record})
        self._channel.expect("go")
