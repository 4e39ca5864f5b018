"""What tests do to the simulated GPU beside what trae_mem.sim.control offers."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading

import torch


@contextlib.contextmanager
def held(stream: int):
    """Work that is queued in the stream inside of the block waits until the block's end."""
    launch = ctypes.CDLL(None).simgpu_launch
    work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    opened = threading.Event()
    wait = work(lambda data: opened.wait() and None)
    nothing = ctypes.c_void_p(None)
    arguments = (ctypes.c_void_p(stream), b"gate", wait, nothing, nothing, nothing)
    assert launch(*arguments, ctypes.c_size_t(0)) == 0
    try:
        yield
    finally:
        opened.set()
        _KEPT.append(wait)  # the stream's thread may be returning from it just now


_KEPT: list[object] = []


def let_go() -> None:
    """What nothing refers to any more is gone afterwards, the graphs of backwards included.

    Autograd's thread may hold the last graph for a moment after its backward has returned. It has
    let go of it when it has run another one.
    """
    torch.ones(1, device="cuda", requires_grad=True).sum().backward()
    gc.collect()
    torch.cuda.synchronize()
