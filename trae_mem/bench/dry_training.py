"""A training run on the simulated GPU in dry mode: real host code, true allocations, no numbers.

Runs in a process of its own (`trae_mem/bench/child.py`), since a peak belongs to a process.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from torch import nn

from trae_mem.bench.large_models import LargeLlama, build_with_adapters


class DryTraining:
    """LoRA training of one model, all resident or streaming.

    Args:
        shape: fields of :class:`LargeLlama`.
        dtype: "bfloat16" or "float16" of the frozen weights; float16 trains with a GradScaler.
        rank: of the adapters.
        checkpointing: whether each layer's activations are recomputed in backward.
        prefetch: as in ``trae_mem.enable``; ``None``: all resident, without us.
    """

    def __init__(
        self,
        shape: dict[str, Any],
        dtype: str,
        rank: int,
        checkpointing: bool,
        prefetch: int | None,
    ) -> None:
        self._shape = LargeLlama(**shape)
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._rank, self._checkpointing, self._prefetch = rank, checkpointing, prefetch

    def run(self, batch: int, length: int, accumulation: int, steps: int) -> dict[str, Any]:
        """Trains; what each step needed at most, or why it ended.

        Args:
            batch, length: of a micro-step, in sequences and tokens.
            accumulation: micro-steps of an optimizer step.
            steps: optimizer steps.
        """
        found: dict[str, Any] = {"steps": [], "out_of_memory": None, "streaming": None}
        try:
            model = self._placed()
            self._train(model, batch, length, accumulation, steps, found["steps"])
            found["streaming"] = _streaming_of(model)
        except torch.OutOfMemoryError as error:
            found["out_of_memory"] = shortened(error)
        return {**found, "peak": _peaks(), "card_bytes": torch.cuda.mem_get_info()[1]}

    def _placed(self) -> nn.Module:
        import trae_mem

        model = build_with_adapters(
            self._shape, self._dtype, rank=self._rank, checkpointing=self._checkpointing
        )
        if self._prefetch is None:
            return model.to_empty(device="cuda")
        return trae_mem.enable(model, prefetch=self._prefetch, device="cuda", source="empty")

    def _train(
        self,
        model: nn.Module,
        batch: int,
        length: int,
        accumulation: int,
        steps: int,
        measured: list[dict[str, float]],
    ) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4)
        scaler = torch.amp.GradScaler("cuda", enabled=self._dtype == torch.float16)
        ids = torch.zeros(batch, length, dtype=torch.long, device="cuda")
        gc.collect()
        for _ in range(steps):
            _reset_peaks()
            begin = time.perf_counter()
            for _ in range(accumulation):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                scaler.scale(loss / accumulation).backward()
                del loss
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            measured.append({**_peaks(), "host_seconds": time.perf_counter() - begin})


def shortened(error: torch.OutOfMemoryError) -> str:
    """The first two sentences: that memory ran out, and what was asked for."""
    return ". ".join(str(error).splitlines()[0].split(". ")[:2]).rstrip(".") + "."


def _streaming_of(model: nn.Module) -> dict[str, Any] | None:
    """What our own accounts say, None where nothing streams."""
    import trae_mem
    from trae_mem.runtime import find_runtime

    if find_runtime(model) is None:
        return None
    status = trae_mem.status(model)
    return {
        "units": status.units,
        "slots": status.slots,
        "unit_bytes": status.unit_bytes,
        "bytes_on_device": status.bytes_on_device,
        "loads": status.loads,
    }


def _reset_peaks() -> None:
    from trae_mem.sim import control

    torch.cuda.reset_peak_memory_stats()
    control.reset_peak(0)


def _peaks() -> dict[str, float]:
    """Bytes since the last reset: of torch's allocator, and of the card as a whole."""
    from trae_mem.sim import control

    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "device_bytes": control.peak_bytes(0),
    }
