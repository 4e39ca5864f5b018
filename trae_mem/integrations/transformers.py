"""Streaming in a `transformers.Trainer` of one's own, and its figures in the Trainer's logs."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

import trae_mem


class TraeMemCallback(TrainerCallback):
    """Streams the model while a Trainer trains it, and adds the streaming's figures to its logs.

        Trainer(model, args, train_dataset=…, callbacks=[TraeMemCallback(prefetch=2)]).train()

    The Trainer moves a model to its device when it is made. For a model that does not fit there,
    call `trae_mem.enable(model)` before and give the Trainer a `TraeMemCallback()` for the logs
    alone: a model that is enabled already is left as it is, and stays enabled.

    Logged are `trae_mem/bytes_on_device`, `trae_mem/loads` and `trae_mem/stall_share`: they are in
    `state.log_history` and in what callbacks behind this one are given. The reporters of
    `report_to` stand before it and do not see them.

    Args:
        options: Those of `trae_mem.enable`.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._enabled_here = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        model = context["model"]
        if not _streams(model):
            trae_mem.enable(model, **self._options)
            self._enabled_here = True

    def on_log(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        logs, model = context.get("logs"), context["model"]
        if logs is not None and _streams(model):
            status = trae_mem.status(model)
            figures = {
                "trae_mem/bytes_on_device": status.bytes_on_device,
                "trae_mem/loads": status.loads,
                "trae_mem/stall_share": status.stall_share,
            }
            logs.update(figures)
            state.log_history[-1].update(figures)  # the Trainer has noted a copy already

    def on_train_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        if self._enabled_here:
            trae_mem.disable(context["model"])
            self._enabled_here = False


def _streams(model: Any) -> bool:
    from trae_mem.runtime import find_runtime

    return find_runtime(model) is not None
