"""Makes a process, and the Python processes that it starts, see a simulated GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from trae_mem.errors import TraeMemError
from trae_mem.sim import libraries
from trae_mem.sim.settings import Settings

__all__ = ["activate", "active"]

_STARTUP = Path(__file__).resolve().parent / "startup"


def active() -> bool:
    """Whether this process sees a simulated GPU."""
    return libraries.loaded()


def activate(
    gpu: str = "A10",
    *,
    devices: int = 1,
    memory: int | str | None = None,
    link: float | str | None = None,
    mode: str = "numeric",
    seed: int = 0,
    delay_us: int = 0,
    poison: bool = False,
    pace: bool = False,
) -> None:
    """From now on, ``import torch`` in this process finds a simulated GPU.

    Builds the simulator if it has changed, so the first call takes minutes. Python processes that
    this one starts with its environment find the same GPU: ``PYTHONPATH`` gets a folder whose
    ``sitecustomize`` module loads the simulator there (``python -I`` and ``-E`` do not read it).

    Args: see :class:`trae_mem.sim.Settings`.

    Raises:
        TraeMemError: torch is imported already, or the process has a simulated GPU already.
        ConfigError: a setting makes no sense.
        NativeLibraryError: the simulator cannot be built here; the message says what is missing.
    """
    settings = Settings(gpu, devices, memory, link, mode, seed, delay_us, poison, pace)
    text = settings.text()
    if active():
        raise TraeMemError(
            "this process has a simulated GPU already, and it cannot be changed. "
            "Use a process for each: python -m trae_mem.sim ..."
        )
    if "torch" in sys.modules:
        raise TraeMemError(
            "torch is imported already, and with it CUDA's own libraries. Call "
            "trae_mem.sim.activate() before the first import of torch, or start the program with "
            "python -m trae_mem.sim"
        )
    built = libraries.build(mode)
    os.environ["TRAE_MEM_SIM"] = text
    built.load()
    _let_children_inherit(built)


def _let_children_inherit(built: libraries.Libraries) -> None:
    os.environ["TRAE_MEM_SIM_LIBRARIES"] = str(built.folder)
    os.environ["TRAE_MEM_SIM_KERNELS"] = str(built.kernels or "")
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in paths if path and path != str(_STARTUP)]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_STARTUP), *others])
