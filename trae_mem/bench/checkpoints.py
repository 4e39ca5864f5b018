"""Llama checkpoints of random weights on disk, written without ever holding more than a tensor."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from trae_mem.bench.models import LlamaShape

WEIGHTS = "model.safetensors"
_DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def write_checkpoint(folder: Path, shape: LlamaShape, dtype: torch.dtype) -> int:
    """Writes a checkpoint of one safetensors file; returns the bytes of a layer."""
    _write_config(folder, shape, dtype)
    with torch.device("meta"):
        model = LlamaForCausalLM(shape.config())
    forms: dict[str, torch.Size] = {
        name: tensor.shape for name, tensor in model.state_dict().items()
    }
    header, end = {}, 0
    for name, form in forms.items():
        begin, end = end, end + form.numel() * dtype.itemsize
        entry = {"dtype": _DTYPE_NAMES[dtype], "shape": list(form), "data_offsets": [begin, end]}
        header[name] = entry
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    generator = torch.Generator().manual_seed(0)
    with (folder / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, form in forms.items():
            tensor = torch.ones(form) if "norm" in name else _random(form, generator)
            file.write(tensor.to(dtype).view(torch.uint8).numpy().tobytes())
    counts: list[int] = [
        form.numel() for name, form in forms.items() if name.startswith("model.layers.0.")
    ]
    return sum(counts) * dtype.itemsize


def shallower(folder: Path, source: Path, shape: LlamaShape, dtype: torch.dtype) -> None:
    """A checkpoint of the first layers of another one, whose file it links to.

    Args:
        folder: the new one.
        source: the deeper one.
        shape: the deeper one's, with fewer layers.
        dtype: of the weights.
    """
    _write_config(folder, shape, dtype)
    os.symlink((source / WEIGHTS).resolve(), folder / WEIGHTS)


def _random(form: torch.Size, generator: torch.Generator) -> torch.Tensor:
    return torch.empty(form).normal_(std=0.02, generator=generator)


def _write_config(folder: Path, shape: LlamaShape, dtype: torch.dtype) -> None:
    folder.mkdir(parents=True)
    config = shape.config()
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = dtype
    config.save_pretrained(folder)
