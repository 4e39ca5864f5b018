"""Where a model computes: the engine's device, torch's name for it, and its current stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from trae_mem.errors import ConfigError
from trae_mem.native import load_native

if TYPE_CHECKING:
    from trae_mem import _native

__all__ = ["Target", "find_target"]


@dataclass(frozen=True)
class Target:
    """A device in both worlds.

    ``stream()`` is the handle of the stream in which the calling thread computes now, as the
    engine takes it: the value of the ``CUstream``, or 0 on a host device, which stands for the
    calling thread (csrc/core/device.h).
    """

    native: _native.Device
    device: torch.device
    stream: Callable[[], int]


def find_target(wanted: torch.device | str | _native.Device | None, model: nn.Module) -> Target:
    """The device of that name.

    Args:
        wanted: ``None`` takes the GPU that holds a part of the model, else the current GPU, else
            the CPU, whose memory is then the device.
        model: whose tensors say which of several GPUs is meant.

    Raises:
        ConfigError: no such device, or one that this version cannot stream to.
        TraeMemError: a GPU whose driver or container lacks what streaming needs; says what.
    """
    native = load_native()
    if wanted is None:
        wanted = _default(model)
    if isinstance(wanted, (str, torch.device)):
        return _named(_parsed(wanted))
    if isinstance(wanted, native.CudaDevice):
        return _cuda(wanted, wanted.index)
    return Target(wanted, torch.device("cpu"), _calling_thread)


def _default(model: nn.Module) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cuda":
            return tensor.device
    return torch.device("cuda")


def _parsed(name: str | torch.device) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r}: {error}") from error


def _named(device: torch.device) -> Target:
    native = load_native()
    if device.type == "cpu":
        return Target(native.HostDevice.from_environment(), torch.device("cpu"), _calling_thread)
    if device.type != "cuda":
        raise ConfigError(
            f"device={str(device)!r}: this version streams to NVIDIA GPUs, device='cuda', and to "
            "the CPU's memory, device='cpu'"
        )
    if not torch.cuda.is_available():
        build = "is a CPU build" if torch.version.cuda is None else "sees no GPU"
        raise ConfigError(
            f"device={str(device)!r}: torch {torch.__version__} {build}. Run "
            "`python -c 'import torch; torch.cuda.init()'` to see why, or pass device='cpu'"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"device={str(device)!r}: torch sees {torch.cuda.device_count()} GPU(s), numbered "
            "from 0"
        )
    torch.cuda.init()  # type: ignore[no-untyped-call]  # torch's own errors about a GPU are clear; ours would come second
    return _cuda(native.CudaDevice(index), index)


def _cuda(native: _native.Device, index: int) -> Target:
    # What torch.cuda.current_stream(index).cuda_stream gives, without two objects a call;
    # torch's own compiled code asks in the same way.
    raw_stream = torch._C._cuda_getCurrentRawStream
    return Target(native, torch.device("cuda", index), lambda: raw_stream(index))


def _calling_thread() -> int:
    return 0
