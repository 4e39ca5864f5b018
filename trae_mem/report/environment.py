"""The machine and the versions a figure was measured with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any


def describe_environment(device: str) -> dict[str, Any]:
    """What to write beside every measured figure; `device` is "cpu" or "cuda"."""
    import psutil
    import torch

    environment: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }
    for package in ("trae-mem", "torch", "transformers", "peft", "accelerate"):
        try:
            environment[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            environment[package] = None
    return environment


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
