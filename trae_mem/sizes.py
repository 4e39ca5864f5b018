"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import re

from trae_mem.errors import ConfigError

__all__ = ["format_bytes", "parse_bytes"]

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*")


def format_bytes(size: float) -> str:
    """``"1.23 GiB"``: two decimals from a KiB up, whole bytes below."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.2f} {units[0]}"


def parse_bytes(size: int | str) -> int:
    """Bytes from a number or from text such as ``"10GiB"`` or ``"500 MB"``.

    Raises:
        ConfigError: for a negative number, or text that is not a size.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise ConfigError(f"not a size in bytes: {size!r}; write a number or '10GiB'")
    if isinstance(size, int):
        if size < 0:
            raise ConfigError(f"a size cannot be negative: {size}")
        return size
    match = _SIZE.fullmatch(size)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"not a size in bytes: {size!r}; write a number or '10GiB'")
    return int(float(match[1]) * _UNITS[match[2].lower()])
