"""The output folder: made and tried at the start, so that no run fails where it would save."""

from __future__ import annotations

import shutil
from pathlib import Path

from trae_mem.errors import ConfigError
from trae_mem.report.summary import (
    ADAPTER,
    EVENTS,
    LAYERS_PLOT,
    MEMORY,
    MEMORY_PLOT,
    RESIDENT,
    SUMMARY,
)
from trae_mem.sizes import format_bytes

MINIMUM_FREE_BYTES = 64 << 20  # adapters are small; a disk with less is as good as full


def prepare_output(path: str, *, clean: bool = True) -> Path:
    """Makes the folder, and tries to write there.

    Args:
        path: The folder.
        clean: Remove what an earlier run left under our names.

    Raises:
        ConfigError: The folder cannot be made or written, or its disk is full.
    """
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".write-test"
        probe.write_bytes(b"\0" * 65536)
        probe.unlink()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ConfigError(
            f"output_dir {str(folder)!r} cannot be written: {error.strerror}; "
            "set output_dir=FOLDER to one that can"
        ) from error
    if free < MINIMUM_FREE_BYTES:
        raise ConfigError(
            f"output_dir {str(folder)!r}: its disk has {format_bytes(free)} left, "
            f"{format_bytes(MINIMUM_FREE_BYTES)} are needed; set output_dir=FOLDER on another disk"
        )
    if clean:
        _remove_results(folder)
    return folder


def _remove_results(folder: Path) -> None:
    for name in (SUMMARY, EVENTS, MEMORY, MEMORY_PLOT, LAYERS_PLOT):
        (folder / name).unlink(missing_ok=True)
    for name in (ADAPTER, RESIDENT):
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
