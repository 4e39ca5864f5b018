"""Builds what is compiled against the installed torch: the simulated GPU's CPU kernels.

The core knows nothing of torch, so this is a library of its own, in a folder that carries torch's
version: the headers it was compiled with must be those of the torch that loads it. Torch is found,
not imported: importing it would load CUDA's libraries, which the simulator has to be before.

    python tools/torch_build.py        builds build/native/release/torch-<version>/*.so
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import native_build

KERNELS = "libsimgpu_kernels.so"


@dataclass(frozen=True)
class Torch:
    """An installed torch."""

    folder: Path
    version: str
    cuda: str | None  # "13.0"; None for a build without CUDA

    @property
    def includes(self) -> list[Path]:
        root = self.folder / "include"
        return [root, root / "torch" / "csrc" / "api" / "include"]


def find_torch() -> Torch:
    """The torch that `import torch` would load.

    Raises:
        BuildError: there is none, or it came without its headers.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise native_build.BuildError("torch is not installed. Install it: pip install torch.")
    folder = Path(spec.origin).parent
    text = (folder / "version.py").read_text(encoding="utf-8")
    version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=]*= '([^']+)'", text, re.MULTILINE)
    torch = Torch(folder, version[1] if version else "unknown", cuda[1] if cuda else None)
    if not (torch.includes[0] / "ATen" / "core" / "Tensor.h").exists():
        raise native_build.BuildError(
            f"torch's headers are not in {torch.includes[0]}: this torch {torch.version} cannot be "
            "compiled against. Install it as pip gives it: pip install --force-reinstall torch."
        )
    return torch


def build_kernels() -> Path:
    """Builds the simulated GPU's kernels; returns the library's path.

    Raises:
        BuildError: no compiler, no torch with CUDA, or the compiler found an error.
    """
    torch = find_torch()
    if torch.cuda is None:
        raise native_build.BuildError(
            f"torch {torch.version} is a build without CUDA; the simulated GPU runs the CUDA "
            "build's own code. Install that: pip install torch."
        )
    sources = sorted((native_build.ROOT / "csrc" / "simgpu" / "kernels").glob("*.cpp"))
    return _build(torch, KERNELS, sources, ["torch_cpu", "c10"])


def _build(torch: Torch, name: str, sources: list[Path], libraries: Iterable[str]) -> Path:
    """Compiles and links one library for the release variant."""
    if not sources:
        raise native_build.BuildError(
            f"the sources of {name} are not in {native_build.ROOT}: the checkout is not complete."
        )
    part = f"torch-{torch.version}"
    with native_build.locked(native_build.BUILD / "release" / part):
        manifest = native_build.Manifest("release", part)
        # Torch's headers do not hold themselves to our warnings.
        headers = [word for path in torch.includes for word in ("-isystem", str(path))]
        flags = [*native_build.WARNINGS, *headers]
        objects = manifest.objects(Path(name).stem, sources, flags)
        found = [f"-L{torch.folder / 'lib'}", *(f"-l{library}" for library in libraries)]
        # Torch is loaded already, and so is the simulator: nothing is searched for at run time.
        manifest.link(name, objects, ["-shared"], found)
        manifest.write()
        return native_build.build(manifest, name, f"{name} for torch {torch.version}")


def main() -> int:
    argparse.ArgumentParser(description="Build what is compiled against torch.").parse_args()
    try:
        print(build_kernels())
    except native_build.BuildError as error:
        print(f"trae_mem: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
