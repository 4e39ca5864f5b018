"""Looks into the simulated GPU of this process, and lets it misbehave.

Everything here raises :class:`TraeMemError` in a process without one.
"""

from __future__ import annotations

import ctypes
import functools
import json
from dataclasses import dataclass, field
from typing import Any

from trae_mem.errors import TraeMemError
from trae_mem.sim import libraries
from trae_mem.sim.settings import parse_rate
from trae_mem.sizes import parse_bytes

__all__ = [
    "Calls",
    "Report",
    "blocking_calls",
    "busy_seconds",
    "calls",
    "clear_faults",
    "clear_reports",
    "fail",
    "live",
    "peak_bytes",
    "reports",
    "reset_calls",
    "reset_peak",
    "set_adversary",
    "set_link",
    "set_memory",
    "used_bytes",
]

_BUSY = {"kernels": 0, "to_device": 1, "to_host": 2}


@dataclass(frozen=True)
class Calls:
    """How often a function of the CUDA API was called."""

    count: int  # calls
    blocking: int  # those that made the host wait for the device
    by: dict[str, int] = field(default_factory=dict)  # count by calling library's file name
    blocking_by: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """One misuse of the API that the simulator noticed."""

    kind: str  # "unmap under pending work"
    message: str
    stack: tuple[str, ...]  # of the host's call that misused it, or queued the work that did

    def __str__(self) -> str:
        return "\n  ".join([f"{self.kind}: {self.message}", *self.stack])


@functools.cache
def _library() -> ctypes.CDLL:
    if not libraries.loaded():
        raise TraeMemError(
            "this process has no simulated GPU: call trae_mem.sim.activate() before torch is "
            "imported, or start the program with python -m trae_mem.sim"
        )
    library = ctypes.CDLL(None)
    size, number, text, real = ctypes.c_size_t, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_double
    whole, nothing = ctypes.c_int, None
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "calls": (size, [text, size]),
        "reports": (size, [text, size]),
        "live": (size, [text, size]),
        "reset_calls": (nothing, []),
        "fail": (nothing, [text, number, whole, whole, text]),
        "clear_faults": (nothing, []),
        "clear_reports": (nothing, []),
        "set_adversary": (nothing, [number, number, whole]),
        "set_link": (nothing, [real]),
        "set_memory": (nothing, [whole, number]),
        "used_bytes": (number, [whole]),
        "peak_bytes": (number, [whole]),
        "reset_peak": (nothing, [whole]),
        "busy_seconds": (real, [whole, whole]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"simgpu_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def _call(name: str, *arguments: object) -> Any:
    return getattr(_library(), f"simgpu_{name}")(*arguments)


def _read_json(name: str) -> Any:
    size = 1 << 16
    while True:
        buffer = ctypes.create_string_buffer(size)
        needed = int(_call(name, buffer, size))
        if needed <= size:
            return json.loads(buffer.value.decode(errors="replace"))
        size = needed + (1 << 12)  # others may add to it meanwhile


def calls() -> dict[str, Calls]:
    """The API's calls since :func:`reset_calls`, by function; those never called are left out."""
    return {name: Calls(**facts) for name, facts in _read_json("calls").items()}


def blocking_calls(caller: str = "") -> dict[str, int]:
    """How often each function made the host wait for the device; those that never did are left out.

    Args:
        caller: count only calls from libraries whose file name contains this ("_native").
    """
    found = {}
    for name, facts in calls().items():
        by = facts.blocking_by.items()
        count = sum(n for who, n in by if caller in who) if caller else facts.blocking
        if count:
            found[name] = count
    return found


def reset_calls() -> None:
    """Counts from zero again."""
    _call("reset_calls")


def fail(
    function: str, nth: int = 1, code: int = 0, sticky: bool = False, caller: str = ""
) -> None:
    """Makes a call of the CUDA API fail.

    Args:
        function: its name, "cuMemMap".
        nth: which of its calls from now on; 1 is the next.
        code: a CUresult or cudaError_t; 0: out of memory for what allocates, else unknown.
        sticky: every later call fails, too, until :func:`clear_faults`.
        caller: only calls from libraries whose file name contains this count.
    """
    _call("fail", function.encode(), nth, code, int(sticky), caller.encode())


def clear_faults() -> None:
    """Forgets planned faults, and heals a device that has failed for good."""
    _call("clear_faults")


def reports() -> list[Report]:
    """The misuse so far, oldest first."""
    found = _read_json("reports")
    return [Report(one["kind"], one["message"], tuple(one["stack"])) for one in found]


def clear_reports() -> None:
    """Forgets the misuse so far."""
    _call("clear_reports")


def live() -> dict[str, dict[str, int]]:
    """What lives (handles, mapped_bytes, streams, …), by the file name of the library that made it.

    Libraries that hold nothing are left out.
    """
    found: dict[str, dict[str, int]] = _read_json("live")
    return found


def set_adversary(seed: int = 0, delay_us: int = 0, poison: bool = False) -> None:
    """From now on: random delays of up to ``delay_us``; fresh and freed memory full of NaN."""
    _call("set_adversary", seed, delay_us, int(poison))


def set_link(rate: float | str) -> None:
    """From now on, paced copies take this many bytes/s; 0 means no limit."""
    _call("set_link", parse_rate(rate))


def set_memory(size: int | str, device: int = 0) -> None:
    """Gives a device this capacity; what is allocated already stays."""
    _call("set_memory", device, parse_bytes(size))


def used_bytes(device: int = 0) -> int:
    """Physical memory of the device that is in use."""
    return int(_call("used_bytes", device))


def peak_bytes(device: int = 0) -> int:
    """The most of it that was in use at a time, since :func:`reset_peak`."""
    return int(_call("peak_bytes", device))


def reset_peak(device: int = 0) -> None:
    """The peak is what is in use now."""
    _call("reset_peak", device)


def busy_seconds(what: str, device: int = 0) -> float:
    """How long an engine was busy, in modelled time; only paced work takes any.

    Args:
        what: "kernels", "to_device" or "to_host".
    """
    if what not in _BUSY:
        raise ValueError(f"no engine {what!r}; there are {', '.join(_BUSY)}")
    return float(_call("busy_seconds", device, _BUSY[what]))
