"""One measured thing in a process of its own, so that it has a peak memory of its own.

The parent names a class; the child makes one object of it and calls its methods when told to.
Several children can be asked in turns.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from trae_mem.errors import TraeMemError
from trae_mem.training.channel import Channel, PeerGoneError


class ChildError(TraeMemError):
    """A measurement's process failed or ended."""


class Child:
    """The parent's handle; ends the process when its `with` block is left.

    Args:
        subject: what to make there, as ``"module:Class"``.
        arguments: keyword arguments for it, as JSON knows them.
        threads: of torch; ``None`` leaves torch's own choice.
        simulated: options of ``python -m trae_mem.sim``, to run the child on a simulated GPU;
            ``None``: it runs as it is.
    """

    def __init__(
        self,
        subject: str,
        arguments: dict[str, Any],
        *,
        threads: int | None = None,
        simulated: Sequence[str] | None = None,
    ) -> None:
        self._subject = subject
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed when the block is left
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*_interpreter(simulated), "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        self._channel = Channel(ours)
        self._channel.send({"subject": subject, "arguments": arguments, "threads": threads})

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._channel.close()  # the child ends when it finds nobody at the other end
        try:
            self._process.wait(timeout=0 if error is not None else 60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def ask(self, method: str, **arguments: Any) -> Any:
        """Calls the method there and returns what it returns.

        Raises:
            ChildError: it raised, or the process ended.
        """
        try:
            self._channel.send({"method": method, "arguments": arguments})
            answer = self._channel.receive()
        except PeerGoneError:
            code = self._process.wait(timeout=60)
            self._log.seek(0)
            tail = self._log.read().decode(errors="replace").strip().splitlines()[-15:]
            raise ChildError(
                f"the process of {self._subject} ended (exit code {code}):\n" + "\n".join(tail)
            ) from None
        if "error" in answer:
            raise ChildError(f"{self._subject}.{method}: {answer['error']}")
        return answer["value"]


def _interpreter(simulated: Sequence[str] | None) -> list[str]:
    if simulated is None:
        return [sys.executable]
    return [sys.executable, "-m", "trae_mem.sim", *simulated]


def _serve(channel: Channel) -> None:
    order = channel.receive()
    if order["threads"] is not None:
        import torch

        torch.set_num_threads(order["threads"])
    module, _, name = order["subject"].partition(":")
    subject = getattr(importlib.import_module(module), name)(**order["arguments"])
    while True:
        try:
            call = channel.receive()
        except PeerGoneError:
            return
        try:
            answer = {"value": getattr(subject, call["method"])(**call["arguments"])}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        channel.send(answer)


def timed(call: Any) -> tuple[Any, float]:
    """What the call returns, and its seconds."""
    begin = time.perf_counter()
    value = call()
    return value, time.perf_counter() - begin


if __name__ == "__main__":
    _serve(Channel.from_descriptor(int(sys.argv[1])))
