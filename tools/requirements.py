"""Prints requirements that pyproject.toml states, one a line, for `pip install -r`.

    python tools/requirements.py build train dev simulator

"build" stands for what the build itself needs, "simulator" for the headers of the simulated GPU,
any other word for an extra. The extension is built without isolation, so these must be there first,
and pyproject.toml stays the only list.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib  # pip is in every venv; 3.10 has no tomllib


def simulator() -> list[str]:
    """The headers that the package of torch's CUDA runtime includes and does not contain.

    Nothing for a torch without CUDA, nor for CUDA 12, whose package is complete.
    """
    try:
        version = importlib.metadata.version("nvidia-cuda-runtime")
    except importlib.metadata.PackageNotFoundError:
        return []
    major, minor, *_ = version.split(".")
    return [f"{name}=={major}.{minor}.*" for name in ("nvidia-cuda-crt", "nvidia-cuda-cccl")]


def main() -> int:
    path = Path(__file__).resolve().parent.parent / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8"))
    lists = {**project["project"]["optional-dependencies"]}
    lists["build"] = project["build-system"]["requires"]
    lists["simulator"] = simulator()
    for name in sys.argv[1:]:
        print("\n".join(lists[name]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
