"""On a GPU: a tiny model trained all resident and streamed must give the same bits.

Every way of checkpointing, weights in RAM and in a file, released slots poisoned or not. Needs
torch only. Losses at every micro-step, gradients at every step and the adapters at the end are
compared byte by byte.
"""

from __future__ import annotations

import itertools
import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import trae_mem
from trae_mem.bench.large_models import LargeLlama
from trae_mem.bench.plain_llama import CHECKPOINTING, PlainLlama, build, fill, tokens
from trae_mem.runtime import find_runtime

_SHAPE = LargeLlama("tiny", layers=7, hidden=64, intermediate=128, heads=4, key_value_heads=2)
_STEPS, _MICRO_STEPS, _BATCH, _LENGTH = 3, 2, 2, 17
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
STORES = ("ram", "file")
DEBUG = (None, "poison")


def run(*, simulated: bool, quick: bool) -> dict[str, Any]:
    """Trains every combination; ``cases`` says of each whether it was the same bit for bit."""
    dtype_names = ("float32",) if quick else ("float32", "bfloat16")
    cases = []
    with tempfile.TemporaryDirectory(prefix="trae-mem-") as folder:
        for dtype_name in dtype_names:
            dtype = getattr(torch, dtype_name)
            file = Path(folder) / f"{dtype_name}.safetensors"
            _write(fill(build(_SHAPE, dtype, "cpu")), file)
            for checkpointing in CHECKPOINTING:
                expected = _train(fill(build(_SHAPE, dtype, "cpu", checkpointing=checkpointing)))
                for store, debug in itertools.product(STORES, DEBUG):
                    case = {
                        "dtype": dtype_name,
                        "checkpointing": checkpointing,
                        "store": store,
                        "debug": debug,
                    }
                    found = _streamed(dtype, checkpointing, store, debug, file)
                    cases.append({**case, "difference": _difference(found, expected)})
    failed = [case for case in cases if case["difference"] is not None]
    return {"cases": cases, "failed": len(failed), "ok": not failed}


def _streamed(
    dtype: torch.dtype, checkpointing: str, store: str, debug: str | None, file: Path
) -> list[tuple[str, Tensor]]:
    model = fill(build(_SHAPE, dtype, "cpu", checkpointing=checkpointing))
    source = str(file) if store == "file" else "ram"
    trae_mem.enable(model, prefetch=1, device="cuda", source=source, debug=debug)
    found = _train(model)
    trae_mem.disable(model)
    return found


def _train(model: PlainLlama) -> list[tuple[str, Tensor]]:
    """Everything that must be equal, by name, on the host."""
    if find_runtime(model) is None:
        model.to("cuda")
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([parameter for _, parameter in trained], lr=1e-2)
    found: list[tuple[str, Tensor]] = []
    for step in range(_STEPS):
        for micro_step in range(_MICRO_STEPS):
            number = step * _MICRO_STEPS + micro_step
            loss = model(tokens(number, _BATCH, _LENGTH, _SHAPE.vocabulary, "cuda"))
            loss.backward()
            found.append((f"loss {number}", loss.detach().cpu()))
        for name, parameter in trained:
            assert parameter.grad is not None, name
            found.append((f"gradient of {name} in step {step}", parameter.grad.cpu()))
        optimizer.step()
        optimizer.zero_grad()
    return found + [(name, parameter.detach().cpu()) for name, parameter in trained]


def _difference(found: list[tuple[str, Tensor]], expected: list[tuple[str, Tensor]]) -> str | None:
    """The first thing that differs in a bit, or is no number; None when all is the same."""
    for (name, ours), (_, theirs) in zip(found, expected, strict=True):
        if not torch.isfinite(theirs).all():
            return f"{name} is not finite, all resident"
        if not torch.equal(ours.view(-1).view(torch.uint8), theirs.view(-1).view(torch.uint8)):
            return f"{name} differs"
    return None


def _write(model: PlainLlama, path: Path) -> None:
    """The model as a safetensors file, without the package of that name."""
    header, parts, end = {}, [], 0
    for name, tensor in model.state_dict().items():
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        begin, end = end, end + len(raw)
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        parts.append(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
