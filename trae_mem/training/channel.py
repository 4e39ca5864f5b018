"""JSON lines over a socket between two processes; the end of one is an error in the other."""

from __future__ import annotations

import json
import socket
from typing import Any

from trae_mem.errors import TraeMemError


class PeerGoneError(TraeMemError):
    """The process at the other end closed its socket: it ended, or was killed."""


class Channel:
    """One end of a socket pair; owns it."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._reader = end.makefile("r", encoding="utf-8")

    @classmethod
    def from_descriptor(cls, descriptor: int) -> Channel:
        """The end that was inherited from the parent process as this file descriptor."""
        return cls(socket.socket(fileno=descriptor))

    def send(self, message: dict[str, Any]) -> None:
        """Raises PeerGoneError when nobody reads any more."""
        try:
            self._socket.sendall((json.dumps(message) + "\n").encode())
        except OSError as error:
            raise PeerGoneError("the process at the other end has ended") from error

    def receive(self) -> dict[str, Any]:
        """The next message; blocks. Raises PeerGoneError when the other end closes."""
        try:
            line = self._reader.readline()
        except OSError:
            line = ""
        if not line.endswith("\n"):
            raise PeerGoneError("the process at the other end has ended")
        message = json.loads(line)
        assert isinstance(message, dict)
        return message

    def expect(self, kind: str) -> dict[str, Any]:
        """The next message, which must be of that kind."""
        message = self.receive()
        if message["kind"] != kind:
            raise PeerGoneError(f"expected {kind!r}, got {message['kind']!r}")
        return message

    def close(self) -> None:
        self._reader.close()
        self._socket.close()
