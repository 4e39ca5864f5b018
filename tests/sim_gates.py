"""Streams of a simulated GPU that tests hold and let go, instead of sleeping."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator

import torch

_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Gate:
    """Work on a stream that lasts until it is opened."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._opened = threading.Event()
        self._ended = threading.Event()
        self._run = _WORK(lambda _: self._opened.wait())  # it lets go of the GIL meanwhile
        self._end = _WORK(lambda _: self._ended.set())
        launch = ctypes.CDLL(None).simgpu_launch
        launch.argtypes = [
            *(ctypes.c_void_p, ctypes.c_char_p, _WORK, _WORK),
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
        ]
        assert launch(stream.cuda_stream, b"gate", self._run, self._end, None, None, 0) == 0

    def open(self) -> None:
        self._opened.set()

    def close(self) -> None:
        """Until then the stream needs the functions of this object."""
        self._opened.set()
        self._ended.wait()


@contextlib.contextmanager
def closed_gate(stream: torch.cuda.Stream | None = None) -> Iterator[Gate]:
    """What is queued on the stream in the ``with`` block waits until its end, or for ``open``."""
    gate = Gate(stream or torch.cuda.current_stream())
    try:
        yield gate
    finally:
        gate.close()
