"""Puts a model's packs to rest, in RAM or in their files, and tells where each tensor rests."""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from trae_mem.errors import ConfigError
from trae_mem.loading import (
    Checkpoint,
    FileSpan,
    find_span,
    forget,
    like_parameter,
    swap_tensors,
)
from trae_mem.native import load_native
from trae_mem.packing import Pack, PackedTensor, view

if TYPE_CHECKING:
    from trae_mem import _native

__all__ = ["Store", "build_store"]


class Store(Protocol):
    """Where packs rest. ``hosts[unit][tensor]`` is the tensor to show outside of execution."""

    native: _native.WeightStore
    hosts: list[list[Tensor]]

    def accept(self, unit: int, index: int) -> None:
        """Takes the tensor's current ``data`` as its new bytes, in place of what rests."""

    def keep(self, unit: int, index: int) -> None:
        """Copies the tensor's current ``data``, its window, to where it rests."""


def _check_same_form(packed: PackedTensor) -> None:
    tensor = packed.tensor
    if (tensor.shape, tensor.dtype) != (packed.shape, packed.dtype):
        raise ConfigError(
            f"'{packed.name}' was {packed.dtype} {tuple(packed.shape)} when streaming was enabled "
            f"and is {tensor.dtype} {tuple(tensor.shape)} now: call trae_mem.disable(model) "
            "before converting a model"
        )


class RamStore:
    """Packs in host memory of exactly their size; a tensor's host view lies in its pack."""

    def __init__(self, device: _native.Device) -> None:
        self._store: _native.RamStore = load_native().RamStore(device)
        self.native: _native.WeightStore = self._store
        self.hosts: list[list[Tensor]] = []
        self._packs: list[Pack] = []
        self._places: list[list[Tensor]] = []
        # A Parameter that two units share has one host tensor and a place in both packs.
        self._shown: dict[int, Tensor] = {}

    @torch.no_grad()
    def add(self, pack: Pack) -> None:
        memory = self._store.add_unit(pack.bytes)
        hosts, places = [], []
        for packed in pack.tensors:
            place = view(memory, packed.offset, packed)
            original = packed.tensor.data
            host = self._shown.setdefault(id(packed.tensor), place)
            if original.is_meta:  # source="empty": the pages stay untouched
                swap_tensors(packed.tensor, like_parameter(packed.tensor, host))
            else:
                place.copy_(original)
                packed.tensor.data = host
                forget(original)
            hosts.append(host)
            places.append(place)
        self._packs.append(pack)
        self._places.append(places)
        self.hosts.append(hosts)

    @torch.no_grad()
    def accept(self, unit: int, index: int) -> None:
        packed = self._packs[unit].tensors[index]
        _check_same_form(packed)
        host, place = self.hosts[unit][index], self._places[unit][index]
        for target in (host, place):
            if target.data_ptr() != packed.tensor.data_ptr():
                target.copy_(packed.tensor.data)
        packed.tensor.data = host

    @torch.no_grad()
    def keep(self, unit: int, index: int) -> None:
        host, place = self.hosts[unit][index], self._places[unit][index]
        host.copy_(self._packs[unit].tensors[index].tensor.data)
        if place is not host:
            place.copy_(host)


class FileStore:
    """Packs whose bytes stay in safetensors files; a host tensor is a mapping of its file."""

    def __init__(self) -> None:
        self._store: _native.FileStore = load_native().FileStore()
        self.native: _native.WeightStore = self._store
        self.hosts: list[list[Tensor]] = []
        self._packs: list[Pack] = []
        self._files: dict[str, int] = {}

    def _file(self, path: str) -> int:
        if path not in self._files:
            self._files[path] = self._store.add_file(path)
        return self._files[path]

    def add(self, pack: Pack, spans: list[FileSpan | None]) -> None:
        rows = []
        for packed, span in zip(pack.tensors, spans, strict=True):
            if packed.tensor.device.type != "cpu":  # in no file: it rests in host memory
                packed.tensor.data = packed.tensor.data.cpu()
            file, name, offset = -1, packed.name, 0
            if span is not None:
                file, name, offset = self._file(span.path), span.name, span.offset
            address = packed.tensor.data_ptr()
            rows.append((name, file, offset, packed.bytes, packed.offset, address))
        self._store.add_unit(pack.bytes, rows)
        self._packs.append(pack)
        self.hosts.append([packed.tensor.data for packed in pack.tensors])

    def accept(self, unit: int, index: int) -> None:
        packed = self._packs[unit].tensors[index]
        _check_same_form(packed)
        if packed.tensor.stride() != packed.stride:
            packed.tensor.data = torch.empty_strided(
                packed.shape, packed.stride, dtype=packed.dtype
            ).copy_(packed.tensor.data)
        if packed.tensor.device.type != "cpu":
            packed.tensor.data = packed.tensor.data.cpu()
        moved = packed.tensor.data_ptr() != self.hosts[unit][index].data_ptr()
        if moved:  # a write to the mapping itself is seen by the native store
            self.hosts[unit][index] = packed.tensor.data
            self._store.rest_in_memory(unit, index, packed.tensor.data_ptr())

    @torch.no_grad()
    def keep(self, unit: int, index: int) -> None:
        # A private mapping: the file stays as it is, and the native store sees the copied page.
        self.hosts[unit][index].copy_(self._packs[unit].tensors[index].tensor.data)


def _return_freed_memory() -> None:
    """The C library keeps freed tensors of up to 32 MiB for itself, glibc unless told so."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def build_store(packs: list[Pack], source: str, device: _native.Device) -> Store:
    """Puts the packs to rest.

    Args:
        packs: layouts whose tensors hold their values; each tensor's ``data`` is replaced by the
            tensor that rests, unit by unit, so that the originals' memory goes as this proceeds.
        source: ``"ram"``, ``"file"``, ``"auto"`` (file if most bytes are mapped from files by
            :func:`trae_mem.loading.load_lazily` or by naming a checkpoint before; else ram), or
            the path of a checkpoint, whose tensors must equal the model's. ``"empty"`` reserves
            host memory for tensors on the meta device and leaves it untouched.

    Raises:
        ConfigError: meta tensors without a file behind them, or tensors that differ from it.
        WeightFileError: an unreadable or truncated file.
    """
    if source not in ("auto", "ram", "file", "empty"):
        Checkpoint(source).adopt([(t.name, t.tensor) for pack in packs for t in pack.tensors])
    spans = [[find_span(packed.tensor) for packed in pack.tensors] for pack in packs]
    mapped = sum(span.bytes for row in spans for span in row if span is not None)
    total = sum(packed.bytes for pack in packs for packed in pack.tensors)
    meta = [packed.name for pack in packs for packed in pack.tensors if packed.tensor.is_meta]
    if meta and source != "empty":
        raise ConfigError(
            f"'{meta[0]}' (and {len(meta) - 1} more) is on the meta device, with no file behind "
            "it. Load the model, or pass source='PATH' of its safetensors checkpoint"
        )
    if source == "file" and mapped == 0:
        raise ConfigError(
            "source='file': no weight is mapped from a safetensors file. Load the model with "
            "trae_mem.loading.load_lazily(PATH), or pass source='PATH' of its checkpoint"
        )
    if source in ("ram", "empty") or (source == "auto" and 2 * mapped < total):
        ram = RamStore(device)
        for pack in packs:
            ram.add(pack)
            _return_freed_memory()
        return ram
    _return_freed_memory()
    file = FileStore()
    for pack, row in zip(packs, spans, strict=True):
        file.add(pack, row)
    return file
