"""Training runs on the simulated GPU in dry mode: real host code, true allocations, no numbers.

They run in a simulated process (`trae_mem/bench/child.py`), one after the other: each begins on an
empty card, which is looked after, so that every peak is its own.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from torch import nn

from trae_mem.bench.large_models import LargeLlama, build_with_adapters
from trae_mem.errors import TraeMemError


class DryTraining:
    """LoRA training of one model after the other, all resident or streaming."""

    def run(
        self,
        shape: dict[str, Any],
        dtype: str,
        rank: int,
        checkpointing: bool,
        prefetch: int | None,
        memory_bytes: int,
        batch: int,
        length: int,
        accumulation: int,
        steps: int,
    ) -> dict[str, Any]:
        """Trains; what each step needed at most, or why it ended.

        Args:
            shape: fields of :class:`LargeLlama`.
            dtype: "bfloat16" or "float16" of the frozen weights; float16 trains with a GradScaler.
            rank: of the adapters.
            checkpointing: whether each layer's activations are recomputed in backward.
            prefetch: as in ``trae_mem.enable``; ``None``: all resident, without us.
            memory_bytes: of the card.
            batch, length: of a micro-step, in sequences and tokens.
            accumulation: micro-steps of an optimizer step.
            steps: optimizer steps.

        Raises:
            TraeMemError: the run before left something on the card.
        """
        _empty_card(memory_bytes)
        found: dict[str, Any] = {"steps": [], "out_of_memory": None, "streaming": None}
        training = _Training(LargeLlama(**shape), getattr(torch, dtype), rank, checkpointing)
        try:
            model = training.place(prefetch)
            training.train(model, batch, length, accumulation, steps, found["steps"])
            found["streaming"] = _streaming_of(model)
        except torch.OutOfMemoryError as error:
            found["out_of_memory"] = shortened(error)
        return {**found, "peak": _peaks(), "card_bytes": torch.cuda.mem_get_info()[1]}


class _Training:
    def __init__(
        self, shape: LargeLlama, dtype: torch.dtype, rank: int, checkpointing: bool
    ) -> None:
        self._shape, self._dtype = shape, dtype
        self._rank, self._checkpointing = rank, checkpointing

    def place(self, prefetch: int | None) -> nn.Module:
        import trae_mem

        model = build_with_adapters(
            self._shape, self._dtype, rank=self._rank, checkpointing=self._checkpointing
        )
        if prefetch is None:
            return model.to_empty(device="cuda")
        return trae_mem.enable(model, prefetch=prefetch, device="cuda", source="empty")

    def train(
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


def _empty_card(memory_bytes: int) -> None:
    """Lets go of what is left over, and gives the card its size."""
    from trae_mem.sim import control

    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    if left := control.used_bytes(0):
        raise TraeMemError(
            f"{left} bytes of the run before are still on the simulated card: its peaks would be "
            "counted to this run"
        )
    control.set_memory(memory_bytes)
    _reset_peaks()


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
