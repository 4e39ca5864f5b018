"""Llama checkpoints of random weights on disk, written without ever holding more than a layer."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from trae_mem.bench.models import LlamaShape

INDEX = "model.safetensors.index.json"


def write_checkpoint(folder: Path, shape: LlamaShape, dtype: torch.dtype) -> int:
    """Writes a checkpoint, one file a layer; returns the bytes of one layer."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    files = {"outside": "", **{f"model.layers.{i}.": "" for i in range(shape.layers)}}
    forms = _forms(shape)
    sizes: dict[str, int] = {}
    for number, prefix in enumerate(files):
        file = files[prefix] = f"model-{number:05d}.safetensors"
        tensors = {
            name: _random(name, size, generator).to(dtype)
            for name, size in forms.items()
            if _prefix(name) == prefix
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        sizes[prefix] = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    _write_config(folder, shape, dtype)
    _write_index(folder, {name: files[_prefix(name)] for name in forms})
    return sizes["model.layers.0."]


def shallower(folder: Path, source: Path, shape: LlamaShape, dtype: torch.dtype) -> None:
    """A checkpoint of the first layers of another one, whose files it links to.

    Args:
        folder: the new one.
        source: the deeper one.
        shape: the deeper one's, with fewer layers.
        dtype: of the weights.
    """
    folder.mkdir(parents=True)
    _write_config(folder, shape, dtype)
    known = json.loads((source / INDEX).read_text(encoding="utf-8"))["weight_map"]
    files = {name: known[name] for name in _forms(shape)}
    for file in set(files.values()):
        os.symlink((source / file).resolve(), folder / file)
    _write_index(folder, files)


def _forms(shape: LlamaShape) -> dict[str, torch.Size]:
    with torch.device("meta"):
        model = LlamaForCausalLM(dataclasses.replace(shape).config())
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def _prefix(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[:3]) + "." if parts[1] == "layers" else "outside"


def _random(name: str, size: torch.Size, generator: torch.Generator) -> Tensor:
    if "norm" in name:
        return torch.ones(size)
    return torch.empty(size).normal_(std=0.02, generator=generator)


def _write_config(folder: Path, shape: LlamaShape, dtype: torch.dtype) -> None:
    config = shape.config()
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = dtype
    config.save_pretrained(folder)


def _write_index(folder: Path, files: dict[str, str]) -> None:
    text = json.dumps({"metadata": {}, "weight_map": files})
    (folder / INDEX).write_text(text, encoding="utf-8")
