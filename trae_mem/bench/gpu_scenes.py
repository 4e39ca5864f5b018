"""The scenes of `make gpu-check`: what a real GPU does with models that do not fit it.

Each is a function that returns what it found as JSON knows it, and runs in a process of its own,
so that a scene that runs out of memory, or of time, takes nothing from the next. They need torch
only. `quick` takes fewer steps. On the simulated GPU the weights are empty; on a real one they are
numbers, since zeros and NaN would cost less power and so less time.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

import trae_mem
from trae_mem.bench.dry_training import shortened
from trae_mem.bench.large_models import LLAMA_2_7B, LLAMA_2_70B, LargeLlama
from trae_mem.bench.overlap_gpu import CHECKED_PREFETCH, Workload, at_token_counts
from trae_mem.bench.plain_llama import PlainLlama, build, fill, tokens
from trae_mem.native import load_native
from trae_mem.runtime import find_runtime

_GIB = 1 << 30
CAP = 24 * _GIB  # the card that a larger one is held to
LENGTH = 2048  # tokens


def device(*, simulated: bool, quick: bool) -> dict[str, Any]:
    """Which GPU this is."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "compute_capability": [properties.major, properties.minor],
        "driver_cuda": _driver_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "pinning": load_native().CudaDevice(0).pinning_note or "pinned",
    }


def _driver_version() -> int:
    """The newest CUDA that the driver knows: 13000 is 13.0."""
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


# --- the link -------------------------------------------------------------------------------------


def link(*, simulated: bool, quick: bool) -> dict[str, Any]:
    """Bytes a second to the device from pinned and from pageable memory, and those of our loads."""
    size = 256 << 20
    there = torch.empty(size, dtype=torch.uint8, device="cuda")
    pageable = torch.empty(size, dtype=torch.uint8)
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    if not simulated:
        pageable.zero_(), pinned.zero_()  # pages that exist
    rates = {
        "pinned": _rate(lambda: there.copy_(pinned, non_blocking=True), size),
        "pageable": _rate(lambda: there.copy_(pageable), size),
        "to_host_pinned": _rate(lambda: pinned.copy_(there, non_blocking=True), size),
        "loads": _rate_of_loads(simulated),
    }
    return {
        "bytes_per_second": rates,
        "share_of_pinned": rates["loads"] / rates["pinned"] if rates["pinned"] else None,
        "ok": True,
    }


def _rate(copy: Callable[[], Any], size: int, repeats: int = 8) -> float:
    copy()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        copy()
    torch.cuda.synchronize()
    return repeats * size / (time.perf_counter() - begin)


def _rate_of_loads(simulated: bool) -> float:
    """Through the engine, with nothing computed in between."""
    model = _streaming(_layers_of(LLAMA_2_7B, 8), simulated)
    runtime = find_runtime(model)
    assert runtime is not None
    engine, forward = runtime.streamer, load_native().Travel.FORWARD_AROUND
    stream, units = torch.cuda.current_stream().cuda_stream, range(len(runtime.packs))

    def once() -> None:
        for unit in units:
            engine.acquire(unit, stream, forward)
            engine.release(unit, stream)

    once()
    torch.cuda.synchronize()
    before, begin = trae_mem.status(model).load_bytes, time.perf_counter()
    for _ in range(3):
        once()
    torch.cuda.synchronize()
    return (trae_mem.status(model).load_bytes - before) / (time.perf_counter() - begin)


# --- models that do not fit ----------------------------------------------------------------------


def capped_7b(*, simulated: bool, quick: bool) -> dict[str, Any]:
    """7B shapes, batch 8 x 2048 under 24 GiB: all resident, with checkpointing too, and with us."""
    total = torch.cuda.mem_get_info()[1]
    cap, steps = min(CAP, total), 1 if quick else 3
    found: dict[str, Any] = {"cap_bytes": cap}
    for name, checkpointing in (("resident", "none"), ("resident_checkpointed", "non-reentrant")):
        torch.cuda.set_per_process_memory_fraction(cap / total)
        # What is not there need not be filled: this is about memory alone.
        make = functools.partial(build, LLAMA_2_7B, torch.bfloat16, "cuda")
        found[name] = _trained(
            functools.partial(make, checkpointing=checkpointing), batch=8, steps=steps
        )
    # Our slots are not torch's, so its share of the cap is smaller.
    torch.cuda.set_per_process_memory_fraction(1.0)
    model = _streaming(LLAMA_2_7B, simulated)
    slots = trae_mem.status(model).bytes_on_device
    torch.cuda.set_per_process_memory_fraction((cap - slots) / total)
    found["streaming"] = {**_trained(lambda: model, batch=8, steps=steps), "slots_bytes": slots}
    found["ok"] = (
        found["resident"]["out_of_memory"] is not None
        and found["streaming"]["out_of_memory"] is None
        and found["streaming"]["reserved_bytes"] + slots <= cap
    )
    return found


def large_70b(*, simulated: bool, quick: bool) -> dict[str, Any]:
    """70B shapes in 24 GiB: 8 layers ten times over, for the loads and activations of all 80.

    Eighty different layers would need 137 GB of pinned host memory in bf16. Weights in NF4 would
    need a quarter; this version does not measure them.
    """
    total = torch.cuda.mem_get_info()[1]
    cap = min(CAP, total)
    model = _streaming(_layers_of(LLAMA_2_70B, 8), simulated, repeats=10)
    slots = trae_mem.status(model).bytes_on_device
    torch.cuda.set_per_process_memory_fraction((cap - slots) / total)
    found = _trained(lambda: model, batch=2, steps=1 if quick else 3)
    found |= {"cap_bytes": cap, "slots_bytes": slots, "weights": "bf16, 8 layers x 10"}
    fits = found["out_of_memory"] is None and found["reserved_bytes"] + slots <= cap
    return {**found, "ok": fits}


def throughput(*, simulated: bool, quick: bool) -> dict[str, Any]:
    """Tokens a second, streamed and all resident, at 1k, 4k and 16k tokens a step."""
    total = torch.cuda.mem_get_info()[1]
    layers = 32 if total > 40 * _GIB else 16  # the resident model must fit beside the slots
    workload = Workload(
        _layers_of(LLAMA_2_7B, layers, vocabulary=256),
        1,
        1024,
        checkpointing="non-reentrant",
        empty=simulated,
    )
    sizes = ((1, 1024), (2, 2048), (8, 2048))
    rounds = 1 if quick else 3
    found = at_token_counts(workload, sizes, CHECKED_PREFETCH, rounds=rounds, seconds=150.0)
    for point in found["points"]:
        for name, key in (("streaming", "step_seconds"), ("resident", "compute_seconds")):
            point[f"tokens_per_second_{name}"] = point["tokens"] / point[key]["median"]
    odd = sum(point["steps_with_other_loads"] for point in found["points"])
    return {**found, "layers": layers, "ok": not found["steps_with_other_loss"] and not odd}


def _layers_of(shape: LargeLlama, layers: int, *, vocabulary: int | None = None) -> LargeLlama:
    sizes = {**vars(shape), "layers": layers, "vocabulary": vocabulary or shape.vocabulary}
    return LargeLlama(**sizes)


def _streaming(shape: LargeLlama, simulated: bool, *, repeats: int = 1) -> PlainLlama:
    """The model, checkpointed and streaming, with numbers for weights on a real GPU."""
    options: dict[str, Any] = {"checkpointing": "non-reentrant", "repeats": repeats}
    model = build(shape, torch.bfloat16, "meta" if simulated else "cpu", **options)
    if not simulated:
        fill(model, alike=True)
    source = "empty" if simulated else "ram"
    trae_mem.enable(model, prefetch=CHECKED_PREFETCH, device="cuda", source=source)
    return model


def _trained(make: Callable[[], PlainLlama], *, batch: int, steps: int) -> dict[str, Any]:
    """Trains; the peaks, the seconds of a step, and whether memory ran out."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.mem_get_info()[0]
    seconds: list[float] = []
    error, least_free = None, before
    try:
        model = make()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4)
        for step in range(steps):
            begin = time.perf_counter()
            model(tokens(step, batch, LENGTH, model.shape.vocabulary, "cuda")).backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
            least_free = min(least_free, torch.cuda.mem_get_info()[0])
    except torch.OutOfMemoryError as found:
        error = shortened(found)
    last = seconds[-1] if seconds else None
    return {
        "batch": batch,
        "steps": len(seconds),
        "out_of_memory": error,
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "device_bytes_added": before - least_free,
        "step_seconds": last,
        "tokens_per_second": batch * LENGTH / last if last else None,
    }
