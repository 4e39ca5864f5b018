"""The machine, the versions and the commit that a benchmark was run with; no name, no path."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import trae_mem
from trae_mem.report.environment import describe_environment

_PACKAGE = Path(trae_mem.__file__).parent


def describe_benchmark_environment(
    threads: int, device: str = "cpu", simulated: str | None = None
) -> dict[str, Any]:
    """The environment of a run.

    Args:
        threads: that it computes with.
        device: "cpu" or "cuda".
        simulated: the card that the run simulated, if it did; the device is then the machine that
            did so.
    """
    environment = {**describe_environment(device), "threads": threads}
    if simulated is not None:
        environment["simulated_gpu"] = simulated
    environment.pop("trae-mem", None)
    return {
        **environment,
        "kernel": platform.release(),
        "trae_mem": trae_mem.__version__,
        "git_commit": git_commit(),
    }


def git_commit() -> str | None:
    """The checkout's commit, with ``+changes`` where files differ; None outside of one."""
    try:
        # The package may be installed in somebody else's repository: then it is not tracked.
        _git("ls-files", "--error-unmatch", "__init__.py")
        commit = _git("rev-parse", "--short=12", "HEAD")
        return commit + ("+changes" if _git("status", "--porcelain", "--", ".", "../csrc") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_PACKAGE), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    return done.stdout.strip()


def machine_line(environment: dict[str, Any]) -> str:
    """The machine in one line, for captions."""
    memory = environment["memory_bytes"] / (1 << 30)
    threads, device = environment["threads"], environment["device"]
    if simulated := environment.get("simulated_gpu"):
        device = f"a simulated {simulated} on {device}"
    return (
        f"measured on: {device}, {environment['cores']} cores, {memory:.0f} GiB, "
        f"torch {environment['torch']}, {threads} compute thread{'s' if threads > 1 else ''}"
    )
