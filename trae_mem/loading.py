"""Safetensors checkpoints as mappings: a model's parameters without reading them.

A mapped tensor costs no memory until it is touched, and it knows its file: ``enable`` then reads
each unit straight from the file when it is needed.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import math
import mmap
import operator
import os
import struct
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trae_mem.errors import ConfigError, WeightFileError

if TYPE_CHECKING:
    from transformers import PreTrainedModel
__all__ = ["Checkpoint", "FileSpan", "find_span", "like_parameter", "load_lazily"]

# Names of safetensors' header, https://github.com/huggingface/safetensors "Format".
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
# Private, so that a write to a mapped tensor never reaches the file; not reserved, so that a
# checkpoint larger than RAM can be mapped (the constant is in Python's mmap from 3.13 on).
_MAP_FLAGS = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
# Linux 5.4; missing in Python's mmap. Unlike MADV_DONTNEED it keeps pages that were written to.
_MADV_PAGEOUT = 21
_MAX_HEADER_BYTES = 100_000_000
# Untyped in torch: exchanges what two tensor objects hold, so that both keep their identity.
swap_tensors: Any = torch.utils.swap_tensors


@dataclass(frozen=True)
class FileSpan:
    """The bytes of one tensor in a safetensors file."""

    path: str
    name: str
    offset: int
    bytes: int


class _Mapping(mmap.mmap):
    """A mapping that keeps what is known of its file, for as long as a tensor uses it."""

    file: MappedFile


class MappedFile:
    """One safetensors file, its header read and its bytes mapped.

    Raises:
        WeightFileError: missing, unreadable, not safetensors, or truncated (names the tensor).
    """

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                self.spans, self._forms = self._read_header(file.read(8), file, size)
                protection = mmap.PROT_READ | mmap.PROT_WRITE
                self._map = _Mapping(file.fileno(), size, flags=_MAP_FLAGS, prot=protection)
        except OSError as error:
            raise WeightFileError(f"cannot read weight file '{path}': {error.strerror}") from error
        self._map.file = self
        self.address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._ordered = sorted(self.spans.values(), key=lambda span: span.offset)
        self._offsets = [span.offset for span in self._ordered]
        _MAPPED.add(self)

    def _read_header(
        self, prefix: bytes, file: Any, size: int
    ) -> tuple[dict[str, FileSpan], dict[str, tuple[torch.dtype, list[int]]]]:
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER_BYTES + 1
        if length > _MAX_HEADER_BYTES:
            raise WeightFileError(f"'{self.path}' is not a safetensors file: its header is broken")
        if 8 + length > size:
            raise WeightFileError(
                f"weight file '{self.path}' is truncated: its header ends at byte {8 + length}, "
                f"the file at {size}. Download or copy it again"
            )
        try:
            header = dict(json.loads(file.read(length)))
        except (TypeError, ValueError) as error:
            raise WeightFileError(
                f"'{self.path}' is not a safetensors file: its header is not a JSON object"
            ) from error
        header.pop("__metadata__", None)
        spans, forms = {}, {}
        for name, entry in header.items():
            dtype, shape, begin, end = self._parse_entry(name, entry)
            if 8 + length + end > size:
                raise WeightFileError(
                    f"weight file '{self.path}' is truncated: tensor '{name}' ends at byte "
                    f"{8 + length + end}, the file at {size}. Download or copy it again"
                )
            spans[name] = FileSpan(self.path, name, 8 + length + begin, end - begin)
            forms[name] = (dtype, shape)
        return spans, forms

    def _parse_entry(self, name: str, entry: Any) -> tuple[torch.dtype, list[int], int, int]:
        """The dtype, shape, and first and last byte of a tensor in the data."""
        try:
            dtype_name, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            dtype = _DTYPES.get(dtype_name)
            numbers = [operator.index(number) for number in (*shape, begin, end)]
        except (KeyError, TypeError, ValueError):
            dtype, numbers = None, [-1]
        if min(numbers) < 0 or (dtype and math.prod(shape) * dtype.itemsize != end - begin):
            raise WeightFileError(
                f"'{self.path}' is not a safetensors file: its header is broken at tensor '{name}'"
            )
        if dtype is None:
            raise WeightFileError(
                f"weight file '{self.path}': tensor '{name}' has dtype {dtype_name}, "
                "which is not supported"
            )
        return dtype, shape, begin, end

    def tensor(self, name: str) -> Tensor:
        """The tensor as a mapping of the file, with a storage of its own."""
        span, (dtype, shape) = self.spans[name], self._forms[name]
        if span.bytes == 0:
            return torch.empty(shape, dtype=dtype)
        raw = torch.frombuffer(
            memoryview(self._map)[span.offset : span.offset + span.bytes], dtype=torch.uint8
        )
        return raw.view(dtype).view(shape)

    def forget(self, span: FileSpan) -> None:
        """Lets go of the memory that reading these bytes took; what was written there stays."""
        begin = span.offset // mmap.PAGESIZE * mmap.PAGESIZE
        with contextlib.suppress(OSError):  # a kernel before 5.4: the memory goes with the model
            self._map.madvise(_MADV_PAGEOUT, begin, span.offset + span.bytes - begin)

    def find(self, address: int, size: int) -> FileSpan | None:
        offset = address - self.address
        index = bisect.bisect_right(self._offsets, offset) - 1
        if index < 0:
            return None
        span = self._ordered[index]
        if offset + size > span.offset + span.bytes:
            return None
        return FileSpan(self.path, span.name, offset, size)


_MAPPED: weakref.WeakSet[MappedFile] = weakref.WeakSet()


def find_span(tensor: Tensor) -> FileSpan | None:
    """Which bytes of which safetensors file the tensor maps; ``None`` for any other tensor."""
    if tensor.is_meta or tensor.numel() == 0:
        return None
    address, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    for file in _MAPPED:
        if (span := file.find(address, size)) is not None:
            return span
    return None


def forget(tensor: Tensor) -> None:
    """Lets go of the memory that reading a mapped tensor took; does nothing for any other."""
    for file in _MAPPED:
        if (span := file.find(tensor.data_ptr(), tensor.nbytes)) is not None:
            file.forget(span)


class Checkpoint:
    """A safetensors file, or a folder with one or with several and an index.

    Raises:
        WeightFileError: nothing there, a shard is missing, or a file cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file_of: dict[str, MappedFile] = {}
        for file_path in self._files():
            file = MappedFile(file_path)
            self._file_of.update(dict.fromkeys(file.spans, file))

    def _files(self) -> list[Path]:
        if self.path.is_file() and self.path.suffix == ".safetensors":
            return [self.path]
        single = self.path / "model.safetensors"
        if single.is_file():
            return [single]
        index = self.path / "model.safetensors.index.json"
        if self.path.name.endswith(".index.json"):
            index = self.path
        if index.is_file():
            try:
                names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
                missing = [name for name in names if not (index.parent / name).is_file()]
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise WeightFileError(
                    f"'{index}' is not the index of a checkpoint. Download or copy it again"
                ) from error
            if missing:
                raise WeightFileError(
                    f"'{index}' names '{missing[0]}', which is not there "
                    f"({len(missing)} of {len(names)} files missing). Download or copy it again"
                )
            return [index.parent / name for name in names]
        raise WeightFileError(
            f"no safetensors checkpoint at '{self.path}': expected a .safetensors file, or a "
            "folder with model.safetensors or model.safetensors.index.json"
        )

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def names(self) -> list[str]:
        return list(self._file_of)

    def tensor(self, name: str) -> Tensor:
        return self._file_of[name].tensor(name)

    def name_of(self, parameter: str) -> str | None:
        """The file's name of a model's parameter.

        The wrapping of PEFT and of torch.compile is taken off, and the base model's prefix may be
        there or not.
        """
        plain = parameter.removeprefix("base_model.model.").replace(".base_layer.", ".")
        plain = plain.replace("_orig_mod.", "")
        if plain in self:
            return plain
        _, _, shorter = plain.partition(".")
        if shorter in self:
            return shorter
        longer = [name for name in self._file_of if name.endswith("." + plain)]
        return longer[0] if len(longer) == 1 else None

    def adopt(self, tensors: list[tuple[str, Tensor]]) -> None:
        """Makes each of the named tensors that the checkpoint holds a mapping of it.

        Raises:
            ConfigError: shape, dtype or values differ, or the checkpoint has none of them.
        """
        # First all checks, then all changes: an error leaves the model as it was.
        adopted: list[tuple[Tensor, Tensor]] = []
        for own_name, tensor in tensors:
            name = self.name_of(own_name)
            if name is None:
                continue
            mapped = self.tensor(name)
            if (mapped.shape, mapped.dtype) != (tensor.shape, tensor.dtype):
                raise ConfigError(
                    f"'{own_name}' is {tensor.dtype} {tuple(tensor.shape)}, in "
                    f"'{self._file_of[name].path}' it is {mapped.dtype} {tuple(mapped.shape)}"
                )
            if not tensor.is_meta:
                if not torch.equal(_raw(tensor).cpu(), _raw(mapped)):
                    raise ConfigError(
                        f"'{own_name}' differs from '{self._file_of[name].path}': it was changed "
                        "after loading. Save the model first, or use source='ram'"
                    )
                self._file_of[name].forget(self._file_of[name].spans[name])
            # A tensor in another order than its file's rests in memory.
            if tensor.is_meta or tensor.is_contiguous():
                adopted.append((tensor, mapped))
        if not adopted:
            raise ConfigError(
                f"'{self.path}' holds none of the weights to stream, for example not "
                f"'{tensors[0][0] if tensors else ''}'"
            )
        for tensor, mapped in adopted:
            if tensor.is_meta:
                # .data cannot change a tensor's backend; swapping keeps the Parameter object.
                swap_tensors(tensor, like_parameter(tensor, mapped))
            else:
                tensor.data = mapped


def _raw(tensor: Tensor) -> Tensor:
    """The tensor's elements in order, as bytes."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def load_lazily(
    path: str | os.PathLike[str], *, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """A causal language model from a checkpoint folder, without reading its weights.

    Every parameter is mapped from its safetensors file and costs no memory until it is touched;
    :func:`trae_mem.enable` then streams the blocks from the file.

    Args:
        path: folder with ``config.json`` and safetensors weights.
        dtype: must be the checkpoint's own, since nothing is converted; ``None`` takes it.

    Raises:
        WeightFileError: no checkpoint there, or a parameter that it lacks.
        ConfigError: another dtype than the checkpoint's was asked for.
    """
    import transformers
    from accelerate import init_empty_weights

    checkpoint = Checkpoint(path)
    if not (Path(path) / "config.json").is_file():
        raise WeightFileError(f"'{path}' has no config.json")
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    # Buffers are computed, not stored: rotary caches and the like must be real.
    with init_empty_weights(include_buffers=False):
        auto: Any = transformers.AutoModelForCausalLM
        model: PreTrainedModel = auto.from_config(config, dtype=dtype or config.dtype)
    model.tie_weights()
    missing = []
    for name, owner, leaf, parameter in _parameters_once(model):
        stored = checkpoint.name_of(name)
        if stored is None:
            missing.append(name)
            continue
        mapped = checkpoint.tensor(stored)
        if dtype is not None and mapped.dtype != dtype:
            raise ConfigError(
                f"'{stored}' is stored as {mapped.dtype}, not {dtype}: lazy loading converts "
                f"nothing. Pass dtype={mapped.dtype}"
            )
        setattr(owner, leaf, nn.Parameter(mapped, requires_grad=parameter.requires_grad))
    if missing:
        raise WeightFileError(
            f"'{path}' lacks '{missing[0]}' ({len(missing)} parameters missing in all)"
        )
    model.tie_weights()
    model.train(False)
    if (Path(path) / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    return model


def like_parameter(tensor: Tensor, data: Tensor) -> Tensor:
    """``data`` as a Parameter if ``tensor`` is one, for ``torch.utils.swap_tensors``."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(data, requires_grad=tensor.requires_grad)
    return data


def _parameters_once(model: nn.Module) -> list[tuple[str, nn.Module, str, nn.Parameter]]:
    found, seen = [], set()
    for path, owner in model.named_modules():
        for leaf, parameter in owner._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found.append((f"{path}.{leaf}" if path else leaf, owner, leaf, parameter))
    return found
