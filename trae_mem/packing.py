"""Packs: a unit's streamed tensors in one contiguous buffer, copied with one call.

Each tensor keeps its strides and begins at a multiple of 256 bytes, the alignment of torch's own
allocations, so that kernels choose the same code path as without us.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from trae_mem.errors import ConfigError
from trae_mem.units import Unit

if TYPE_CHECKING:
    from trae_mem import _native

__all__ = ["Pack", "PackedTensor", "plan_pack", "plan_packs", "tensors_outside", "view"]

ALIGNMENT = 256


@dataclass(frozen=True)
class PackedTensor:
    """One tensor of a unit and its place in the pack.

    ``tensor`` is the Parameter or buffer object itself: it never changes, only its ``data`` does.
    """

    name: str
    tensor: Tensor
    offset: int
    bytes: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    owner: nn.Module


@dataclass(frozen=True)
class Pack:
    """The layout of one unit's pack; ``bytes`` counts up to the end of its last tensor."""

    unit: Unit
    tensors: tuple[PackedTensor, ...]
    bytes: int


def _named_tensors(prefix: str, module: nn.Module) -> Iterator[tuple[str, Tensor, nn.Module]]:
    for path, child in module.named_modules(prefix=prefix):
        dot = f"{path}." if path else ""
        for name, parameter in child._parameters.items():
            if parameter is not None:
                yield dot + name, parameter, child
        for name, buffer in child._buffers.items():
            if buffer is not None:
                yield dot + name, buffer, child


def tensors_outside(model: nn.Module, units: list[Unit]) -> list[tuple[str, Tensor]]:
    """Parameters and buffers of the modules that belong to no unit, with their names."""
    inside = {module for unit in units for module in unit.module.modules()}
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor, owner in _named_tensors("", model):
        if owner not in inside:
            found.setdefault(id(tensor), (name, tensor))
    return list(found.values())


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one range of memory without gaps or overlaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size if size > 1 else 1
    return True


def _changes_without_a_trace(owner: nn.Module, tensor: Tensor) -> bool:
    """Batch norm's kernels write running statistics without moving their version."""
    return isinstance(owner, _NormBase) and not isinstance(tensor, nn.Parameter)


def plan_pack(unit: Unit, used_outside: set[int]) -> Pack:
    """Lays out the unit's frozen parameters and its buffers.

    Left where they are: trainable parameters, tensors that modules outside of the units use too
    (``used_outside`` holds their ids), running statistics of batch norms, and tensors that are
    not strided, dense and filled.
    """
    packed: list[PackedTensor] = []
    seen = set(used_outside)
    end = 0
    for name, tensor, owner in _named_tensors(unit.name, unit.module):
        streams = (
            id(tensor) not in seen
            and not tensor.requires_grad
            and tensor.layout == torch.strided
            and tensor.numel() > 0
            and _is_dense(tensor)
            and not _changes_without_a_trace(owner, tensor)
        )
        seen.add(id(tensor))
        if not streams:
            continue
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        size = tensor.numel() * tensor.element_size()
        packed.append(
            PackedTensor(
                name, tensor, offset, size, tensor.shape, tensor.stride(), tensor.dtype, owner
            )
        )
        end = offset + size
    return Pack(unit, tuple(packed), end)


def plan_packs(model: nn.Module, units: list[Unit]) -> list[Pack]:
    """The packs of the units that have something to stream.

    Raises:
        ConfigError: none of them has.
    """
    outside = {id(tensor) for _, tensor in tensors_outside(model, units)}
    packs = [plan_pack(unit, outside) for unit in units]
    packs = [pack for pack in packs if pack.tensors]
    if not packs:
        trainable = sum(p.requires_grad for unit in units for p in unit.module.parameters())
        raise ConfigError(
            f"nothing is left to stream: the {len(units)} units, '{units[0].name}' and on, have "
            f"no frozen weights ({trainable} trainable parameters stay on the device). Freeze "
            "them (requires_grad_(False)), or train adapters with LoRA"
        )
    return packs


def view(memory: _native.Memory, offset: int, like: PackedTensor) -> Tensor:
    """A tensor over ``memory`` from ``offset`` on, with a storage of its own.

    Storages of their own keep serializers from taking the tensors of a pack for one shared
    tensor. The tensor keeps ``memory`` alive.
    """
    part = memory.part(offset, like.bytes)
    if memory.device >= 0:
        raw = torch.as_tensor(part, device=torch.device("cuda", memory.device))
    else:
        raw = torch.frombuffer(part, dtype=torch.uint8)
    return raw.view(like.dtype).as_strided(like.shape, like.stride)
