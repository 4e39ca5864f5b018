"""The compiled part, loaded when it is first needed.

``import trae_mem`` never fails: a missing or unfit native module explains itself at the first
call that needs it, with the one command that mends it.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

from trae_mem.errors import NativeLibraryError

__all__ = ["load_native"]

# What this Python code expects of the module; csrc/bindings/native.cpp says what it is.
INTERFACE = 2


def _command() -> str:
    root = Path(__file__).resolve().parent.parent
    if (root / "setup.py").is_file() and (root / "csrc").is_dir():
        return f"cd {root} && pip install --no-build-isolation -e ."
    return "pip install --force-reinstall --no-cache-dir --no-deps trae-mem"


@functools.cache
def load_native() -> Any:
    """The module ``trae_mem._native``, whose types ``_native.pyi`` gives.

    Raises:
        NativeLibraryError: if it is missing, cannot be loaded, or was built for another version.
    """
    try:
        module = importlib.import_module("trae_mem._native")
    except ImportError as error:
        raise NativeLibraryError(
            f"trae_mem's compiled part cannot be loaded: {error}. "
            f"It is missing, or was built for another Python. Build it: {_command()}"
        ) from error
    found = getattr(module, "INTERFACE", None)
    if found != INTERFACE:
        raise NativeLibraryError(
            f"trae_mem's compiled part has interface {found}, the Python part needs {INTERFACE}: "
            f"it was left over from another version. Build it again: {_command()}"
        )
    return module
