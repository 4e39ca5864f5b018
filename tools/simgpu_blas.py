"""The simulated GPU's cuBLAS and cuBLASLt, for dry mode: what to compile, and how to link it.

`tools/simgpu_build.py` adds them to its manifest. They take the place of the installed torch's
libraries, so each symbol of those must exist, under the same soname and version node. The few that
frameworks use are in `csrc/simgpu/blas`; for all others this file writes weak stand-ins, which the
linker drops wherever there is a real one.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import native_build

SOURCES = native_build.ROOT / "csrc" / "simgpu" / "blas"
# Which sources make which library; `work.cpp` is in both, so that neither needs the other.
PARTS = {
    "libcublas": ("handle.cpp", "products.cpp", "work.cpp"),
    "libcublasLt": ("lt.cpp", "work.cpp"),
}
SUCCESS, NOT_SUPPORTED = 0, 15  # cublasStatus_t
# A stand-in that computes may say that it did: nothing computes in dry mode. One that should hand
# something out must not, since its caller would use what it never wrote.
HANDS_SOMETHING_OUT = re.compile(r"^cublas(Lt|Xt)?(Get|.*Create|.*GetAttribute|Alloc|XtGet)")


@dataclass(frozen=True)
class Library:
    """One of the installed torch's BLAS libraries."""

    path: Path
    version_node: str
    symbols: tuple[str, ...]

    @property
    def soname(self) -> str:
        return self.path.name

    @property
    def headers(self) -> Path:
        return self.path.parent.parent / "include"


def find_cublas() -> list[Library]:
    """The installed libcublas and libcublasLt.

    Raises:
        BuildError: no torch for CUDA is installed, or its libraries have no headers.
    """
    found = [_read(_find(name)) for name in PARTS]
    for library in found:
        if not (library.headers / "cublas_api.h").exists():
            raise native_build.BuildError(
                f"cublas_api.h is not in {library.headers}, beside {library.soname}. It comes with "
                "the pip package of the library: pip install --force-reinstall --no-deps "
                "nvidia-cublas (torch for CUDA 12: nvidia-cublas-cu12), in torch's version of it."
            )
    return found


def _find(name: str) -> Path:
    for root in _nvidia_folders():
        candidates = sorted(root.glob(f"*/lib/{name}.so.[0-9]*"))
        if candidates:
            return candidates[-1]
    raise native_build.BuildError(
        f"{name} of a torch for CUDA is not installed. The simulated GPU stands in for it and "
        "needs its list of symbols. Install torch as pip gives it: pip install torch."
    )


def _nvidia_folders() -> Iterable[Path]:
    spec = importlib.util.find_spec("nvidia")
    return [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []


def _read(path: Path) -> Library:
    """Symbols and version node, by `nm` (binutils, which every compiler needs anyway)."""
    command = ["nm", "-D", "--defined-only", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise native_build.BuildError(f"nm cannot read {path}: {done.stderr.strip()}")
    symbols, node = [], path.name
    for line in done.stdout.splitlines():
        kind, name = line.split()[-2:]
        if kind == "A":  # the version node itself
            node = name.partition("@")[0]
        elif kind in ("T", "W"):
            symbols.append(name.partition("@")[0])
    return Library(path, node, tuple(sorted(set(symbols))))


def stand_ins(symbols: Iterable[str]) -> str:
    """C++ with a weak function for each symbol."""
    lines = ["// Written by tools/simgpu_blas.py from the installed library's list of symbols.", ""]
    lines.append('extern "C" {')
    for symbol in symbols:
        answer = NOT_SUPPORTED if HANDS_SOMETHING_OUT.match(symbol) else SUCCESS
        lines.append(f"__attribute__((weak)) int {symbol}() {{ return {answer}; }}")
    return "\n".join([*lines, "}", ""])


def version_script(library: Library) -> str:
    """Exports the library's symbols under its version node, and nothing else."""
    names = "\n".join(f"    {symbol};" for symbol in library.symbols)
    return f"{library.version_node} {{\n  global:\n{names}\n  local: *;\n}};\n"


def add(
    manifest: native_build.Manifest, libsimgpu: Path, cuda_headers: Sequence[Path]
) -> list[Path]:
    """Adds both libraries to the manifest; returns their paths, beside `libsimgpu`.

    Args:
        manifest: of the variant that is built.
        libsimgpu: the target that they link to.
        cuda_headers: folders with `driver_types.h`, `cuda_fp16.h` and `crt/`.
    """
    generated = manifest.folder / "obj" / "simgpu-blas"
    generated.mkdir(parents=True, exist_ok=True)
    made = []
    for library in find_cublas():
        name = library.soname.partition(".so")[0]
        stubs = _write(generated / f"{name}_stand_ins.cpp", stand_ins(library.symbols))
        exports = _write(generated / f"{name}.map", version_script(library))
        includes = [f"-isystem{folder}" for folder in (library.headers, *cuda_headers)]
        flags = [*native_build.WARNINGS, "-Werror", "-fvisibility=default", *includes]
        sources = [SOURCES / source for source in PARTS[name]]
        objects = manifest.objects(f"simgpu-blas/{name}", [*sources, stubs], flags)
        target = libsimgpu.parent / library.soname
        link = [
            "-shared",
            f"-Wl,-soname,{library.soname}",
            f"-Wl,--version-script={exports}",
            "-Wl,-rpath,$ORIGIN",
            "-Wl,--no-undefined",
        ]
        relative = str(target.relative_to(manifest.folder))
        manifest.link(relative, [*objects, libsimgpu], link, [])
        made.append(target)
    return made


def _write(path: Path, text: str) -> Path:
    """Writes only what changed, so that ninja compiles only what changed."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
    return path
