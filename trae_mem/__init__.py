"""Layers that stream: fine-tune language models that are larger than your GPU.

    import trae_mem
    model = trae_mem.enable(model, prefetch=2)

See :func:`enable`. Importing this package is cheap; torch is imported with the first function.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str

    from trae_mem._native import HostDevice
    from trae_mem.errors import (
        BudgetError,
        ConfigError,
        NativeLibraryError,
        OutOfMemoryError,
        TraeMemError,
        TransferError,
        WeightFileError,
    )
    from trae_mem.loading import load_lazily
    from trae_mem.recorder import Recorder
    from trae_mem.stats import Status
    from trae_mem.streaming import disable, enable, offloaded, refresh, status

__all__ = [
    "BudgetError",
    "ConfigError",
    "HostDevice",
    "NativeLibraryError",
    "OutOfMemoryError",
    "Recorder",
    "Status",
    "TraeMemError",
    "TransferError",
    "WeightFileError",
    "__version__",
    "disable",
    "enable",
    "load_lazily",
    "offloaded",
    "refresh",
    "status",
]

_MODULES = {
    "errors": (
        "BudgetError",
        "ConfigError",
        "NativeLibraryError",
        "OutOfMemoryError",
        "TraeMemError",
        "TransferError",
        "WeightFileError",
    ),
    "loading": ("load_lazily",),
    "recorder": ("Recorder",),
    "streaming": ("disable", "enable", "offloaded", "refresh", "status"),
    "stats": ("Status",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("trae-mem")
    if name == "HostDevice":
        from trae_mem.native import load_native

        return load_native().HostDevice
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'trae_mem' has no attribute {name!r}")
    return getattr(importlib.import_module(f"trae_mem.{_MODULE_OF[name]}"), name)
