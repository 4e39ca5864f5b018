"""Builds the simulator's libraries, and loads them into this process.

Torch finds CUDA's libraries by their sonames, so ours must be there first: loaded by path, before
torch is imported. The CPU kernels are compiled against torch and come right after it. Both is done
with standard library means only, since every Python child process of a simulated one does it, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from trae_mem.errors import NativeLibraryError

__all__ = ["Libraries", "UnavailableError", "build", "find_inherited", "loaded"]

_ROOT = Path(__file__).resolve().parents[2]

# Order matters: each needs only those before it.
_FACADES = ("libcudart.so.*", "libcuda.so.1", "libnvidia-ml.so.1")
_BLAS = ("libcublasLt.so.*", "libcublas.so.*")  # dry mode only: in numeric mode nothing calls them


class UnavailableError(NativeLibraryError):
    """Something that the simulator is built from is missing here; the message says what."""


@dataclass(frozen=True)
class Libraries:
    """Where the built libraries are."""

    folder: Path
    kernels: Path | None  # None in dry mode

    def load(self) -> None:
        """Takes the place of CUDA's libraries, now; the kernels follow when torch is imported."""
        names = ["libsimgpu.so", *_FACADES]
        if self.kernels is None:
            names += _BLAS
        for name in names:
            found = sorted(self.folder.glob(name))
            if not found:
                raise NativeLibraryError(
                    f"{name} is not in {self.folder}: the simulated GPU is not built completely. "
                    "Build it: python tools/simgpu_build.py"
                )
            ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)
        if self.kernels is not None:
            sys.meta_path.insert(0, _AfterTorch(self.kernels))


def loaded() -> bool:
    """Whether this process has the simulator."""
    return hasattr(ctypes.CDLL(None), "simgpu_mode")


def build(mode: str) -> Libraries:
    """Brings the libraries up to date. The first time takes minutes.

    Raises:
        UnavailableError: the sources, a compiler, headers or the CUDA build of torch are missing.
        NativeLibraryError: the compiler found an error.
    """
    with _build_tools() as (simgpu_build, torch_build):
        chosen = os.environ.get("TRAE_MEM_SIM_LIBRARIES")
        folder = Path(chosen) if chosen else Path(simgpu_build.build())
        return Libraries(folder, None if mode == "dry" else Path(torch_build.build_kernels()))


@contextlib.contextmanager
def _build_tools() -> Iterator[tuple[ModuleType, ModuleType]]:
    tools = _ROOT / "tools"
    if not (tools / "simgpu_build.py").is_file():
        raise UnavailableError(
            f"the simulated GPU is built from the sources, and {_ROOT} is not a checkout of them. "
            "Clone the repository and install it from there: pip install -e ."
        )
    sys.path.insert(0, str(tools))
    try:
        native_build = importlib.import_module("native_build")
        simgpu_build = importlib.import_module("simgpu_build")
        torch_build = importlib.import_module("torch_build")
        try:
            yield simgpu_build, torch_build
        except native_build.CompileError as error:
            raise NativeLibraryError(f"the simulated GPU: {error}") from error
        except native_build.BuildError as error:
            raise UnavailableError(f"the simulated GPU cannot be built: {error}") from error
    finally:
        sys.path.remove(str(tools))


def find_inherited() -> Libraries | None:
    """The libraries of the simulated process that started this one, if there is one."""
    folder = os.environ.get("TRAE_MEM_SIM_LIBRARIES")
    if folder is None or "TRAE_MEM_SIM" not in os.environ:
        return None
    kernels = os.environ.get("TRAE_MEM_SIM_KERNELS")
    return Libraries(Path(folder), Path(kernels) if kernels else None)


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Installs the kernels as soon as torch has been imported."""

    def __init__(self, kernels: Path) -> None:
        self._kernels = kernels

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_install(module: ModuleType) -> None:
                execute(module)
                _install_kernels(self._kernels)

            loader.exec_module = execute_and_install
        return spec


def _install_kernels(path: Path) -> None:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeLibraryError(
            f"the simulated GPU's kernels cannot be loaded: {error}. They were compiled for "
            "another torch, or other sources. Build them again: python tools/torch_build.py"
        ) from error
    message = ctypes.create_string_buffer(4096)
    if library.simgpu_install_kernels(message, len(message)) < 0:
        raise NativeLibraryError(f"the simulated GPU's kernels: {message.value.decode()}")
