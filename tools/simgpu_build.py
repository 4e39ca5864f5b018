"""Builds the simulated GPU: libsimgpu.so and the libraries that stand in for NVIDIA's.

    python tools/simgpu_build.py [release|asan|tsan]

They land in `build/native/<variant>/simgpu`, with the sonames and version nodes that the installed
torch was linked against, so that it finds them in place of its own. Every symbol of the real
libraries exists: for those that `csrc/simgpu` does not implement this file writes weak stand-ins,
which the linker drops wherever there is a real function. Standard library only.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import native_build
import simgpu_blas
from native_build import BuildError

SOURCES = native_build.ROOT / "csrc" / "simgpu"
PART = "simgpu"
CORE, DRIVER, NVML = "libsimgpu.so", "libcuda.so.1", "libnvidia-ml.so.1"
# The prefixes of the facades' sources; what has none of them is the core.
FACADES = ("driver_", "runtime_", "nvml")

# Where toolkits install their headers, as patterns.
TOOLKITS = ("usr/local/cuda/include", "usr/local/cuda-*/include", "usr/include")

INSTALL_TORCH = "Install PyTorch's CUDA build, which needs no GPU: pip install torch."


@dataclass(frozen=True)
class Runtime:
    """The CUDA runtime of the installed torch."""

    soname: str
    version_node: str
    symbols: tuple[str, ...]
    major: int


@dataclass(frozen=True)
class Headers:
    """Where `cuda.h` is, and where `crt/` and `nv/` are, which pip's runtime package lacks."""

    folders: tuple[Path, ...]

    @property
    def driver(self) -> Path:
        return self.folders[0] / "cuda.h"


def libraries_folder(variant: str = "release") -> Path:
    """Where the built libraries are."""
    return native_build.BUILD / variant / PART


# --- what is installed ----------------------------------------------------------------------------


def _package_folder(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed: {done.stderr.strip()}. Is binutils there?")
    return done.stdout


def find_runtime() -> Runtime:
    """Reads soname, version node and symbols of the libcudart that torch is linked against.

    Raises:
        BuildError: no torch, one for CPU only, or its libcudart is not where pip puts it.
    """
    torch = _package_folder("torch")
    if torch is None:
        raise BuildError(f"PyTorch is not installed; the simulated GPU serves it. {INSTALL_TORCH}")
    library = torch / "lib" / "libc10_cuda.so"
    if not library.exists():
        raise BuildError(
            f"PyTorch in {torch} is built for the CPU only: it has no code for CUDA to simulate a "
            f"GPU for. {INSTALL_TORCH}"
        )
    needed = re.search(r"\[(libcudart[^\]]*)\]", _run(["readelf", "-d", str(library)]))
    if needed is None:
        raise BuildError(f"{library} does not need libcudart. {INSTALL_TORCH}")
    real = _find_library(torch, needed.group(1))
    return _read_runtime(real, needed.group(1))


def _find_library(torch: Path, soname: str) -> Path:
    folders = [torch / "lib"]
    nvidia = _package_folder("nvidia")
    if nvidia is not None:
        folders += sorted(nvidia.glob("*/lib"))
    for folder in folders:
        if (folder / soname).exists():
            return folder / soname
    raise BuildError(
        f"{soname}, which PyTorch needs, is in none of {', '.join(map(str, folders))}. Install it: "
        "pip install nvidia-cuda-runtime (torch for CUDA 12: nvidia-cuda-runtime-cu12)."
    )


def _read_runtime(library: Path, soname: str) -> Runtime:
    symbols, node = [], soname
    for line in _run(["nm", "-D", "--defined-only", str(library)]).splitlines():
        kind, name = line.split()[-2:]
        if kind == "A":
            node = name.partition("@")[0]
        elif kind in ("T", "W") and name.startswith(("cuda", "__cuda")):
            symbols.append(name.partition("@")[0])
    major = re.search(r"(\d+)", node)
    if major is None or not symbols:
        raise BuildError(f"{library} is no CUDA runtime: no version node, or no functions.")
    return Runtime(soname, node, tuple(sorted(set(symbols))), int(major.group(1)))


def find_headers(major: int) -> Headers:
    """The CUDA headers of that major version, from a toolkit or from pip's packages.

    Raises:
        BuildError: there are none; the message says what to install.
    """
    candidates = _header_folders()
    whole = [f for f in candidates if _version(f) == major]
    if not whole:
        raise BuildError(
            f"The headers of CUDA {major} (cuda.h, cuda_runtime_api.h) are in none of "
            f"{', '.join(map(str, candidates)) or 'the usual places'}. Install them: "
            f"pip install {_package('nvidia-cuda-runtime', major)}, or set CUDA_HOME to a toolkit."
        )
    # What the runtime's package includes and does not contain: of the compiler, of the C++ library.
    compiler = "nvidia-cuda-nvcc" if major <= 12 else "nvidia-cuda-crt"
    parts = {"crt/host_config.h": compiler, "nv/target": "nvidia-cuda-cccl"}
    for main in whole:
        if all((main / part).exists() for part in parts):
            return Headers((main,))
    folders = [whole[0]]
    for part, package in parts.items():
        found = [f for f in candidates if (f / part).exists() and _version(f) in (None, major)]
        if not found:
            raise BuildError(
                f"{part}, which the headers in {whole[0]} include, is missing there. Install it: "
                f"pip install {_package(package, major)}, or set CUDA_HOME to a toolkit."
            )
        if not any((folder / part).exists() for folder in folders):
            folders.append(found[0])
    return Headers(tuple(folders))


def _package(name: str, major: int) -> str:
    """How pip calls one of NVIDIA's packages in that major version of CUDA."""
    suffix = "-cu12" if major == 12 else ""
    return f"'{name}{suffix}=={major}.*'"


def _header_folders() -> list[Path]:
    folders = []
    nvidia = _package_folder("nvidia")
    if nvidia is not None:
        folders += sorted(nvidia.glob("*/include"))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(name):
            folders.append(Path(home) / "include")
    folders += [folder for place in TOOLKITS for folder in sorted(Path("/").glob(place))]
    parts = ("cuda.h", "crt", "nv")
    return [f for f in folders if any((f / part).exists() for part in parts)]


def _version(folder: Path) -> int | None:
    """The major version of the headers in `folder`; None where it has no cuda.h."""
    header = folder / "cuda.h"
    if not header.exists() or not (folder / "cuda_runtime_api.h").exists():
        return None
    found = re.search(r"^#define CUDA_VERSION (\d+)", header.read_text(errors="replace"), re.M)
    return int(found.group(1)) // 1000 if found else None


# --- what is written ------------------------------------------------------------------------------


def driver_functions(header: str) -> tuple[list[str], dict[str, str]]:
    """All functions that a cuda.h declares, and which version its macros make of a plain name."""
    # Some stand in a macro that may choose the version for per-thread default streams.
    versioned = r"^#define\s+(cu[A-Z]\w*)\s+(?:__CUDA_API_PT[DS][SZ]\()?(cu[A-Z]\w*_v\d+)\)?\s*$"
    newest = dict(re.findall(versioned, header, re.M))
    declared = set(re.findall(r"\bCUDAAPI\s+(cu[A-Z]\w*)\s*\(", header))
    return sorted(declared | set(newest.values())), newest


def stand_ins(functions: Iterable[str], names: dict[str, str] | None = None) -> str:
    """C++ with a weak function for each name, and the table of `names` where it is given."""
    lines = [
        "// Written by tools/simgpu_build.py.",
        "namespace simgpu { enum class Code : int; Code unsupported(const char*, const void*); }",
        "#define STAND_IN(name)                                                               \\",
        '  extern "C" __attribute__((weak, visibility("default"))) int name() {               \\',
        "    return static_cast<int>(                                                         \\",
        "        simgpu::unsupported(#name, __builtin_return_address(0)));                    \\",
        "  }",
        *(f"STAND_IN({name})" for name in functions),
    ]
    if names is not None:
        pairs = "\n".join(f'    {{"{plain}", "{newest}"}},' for plain, newest in names.items())
        lines += [
            "#include <string_view>",
            "namespace simgpu {",
            "const char* newest_name(const char* name) {",
            "  static constexpr struct { const char* plain; const char* newest; } kNames[] = {",
            pairs,
            "  };",
            "  for (const auto& entry : kNames) {",
            "    if (std::string_view(entry.plain) == name) return entry.newest;",
            "  }",
            "  return name;",
            "}",
            "}",
        ]
    return "\n".join([*lines, ""])


def _written(path: Path, text: str) -> Path:
    """Writes only what changed, so that ninja compiles only what changed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
    return path


# --- the build ------------------------------------------------------------------------------------


class _Builder:
    """Adds the libraries to one manifest."""

    def __init__(self, variant: str, runtime: Runtime, headers: Headers) -> None:
        self.manifest = native_build.Manifest(variant, PART)
        self._generated = self.manifest.folder / "generated"
        self._runtime = runtime
        self._headers = headers
        self._includes = [f"-isystem{folder}" for folder in headers.folders]
        self._flags = [*native_build.WARNINGS, "-Werror"]
        if variant == "tsan":
            # glibc frees a late library's thread-local memory where ThreadSanitizer sees no order.
            self._flags.append("-ftls-model=initial-exec")

    def all(self) -> list[Path]:
        core = self._core()
        return [core, self._driver(core), self._runtime_library(core), self._nvml(core)]

    def _objects(self, group: str, sources: Iterable[Path], includes: Iterable[str]) -> list[Path]:
        return self.manifest.objects(group, sources, [*self._flags, *includes])

    def _link(self, soname: str, objects: list[Path], exported: str, node: str = "") -> Path:
        """Only `exported` leaves the library: no template of the standard library does."""
        script = _written(
            self._generated / f"{soname}.map",
            f"{node} {{\n  global: {exported}\n  local: *;\n}};\n",
        )
        flags = [
            "-shared",
            f"-Wl,-soname,{soname}",
            f"-Wl,--version-script={script}",
            "-Wl,-rpath,$ORIGIN",
        ]
        self.manifest.link(soname, objects, flags, [])
        return self.manifest.folder / soname

    def _core(self) -> Path:
        sources = [s for s in sorted(SOURCES.glob("*.cpp")) if not s.name.startswith(FACADES)]
        names = 'simgpu_*; extern "C++" { simgpu::*; };'
        return self._link(CORE, self._objects("core", sources, []), names)

    def _stand_ins(self, group: str, functions: Iterable[str], text: str) -> list[Path]:
        source = _written(self._generated / f"{group}_stand_ins.cpp", text)
        # Declared without parameters, which some names are built-in functions with.
        return self.manifest.objects(group, [source], ["-fno-builtin", "-w"])

    def _driver(self, core: Path) -> Path:
        header = self._headers.driver.read_text(encoding="utf-8", errors="replace")
        functions, newest = driver_functions(header)
        objects = self._objects("driver", sorted(SOURCES.glob("driver_*.cpp")), self._includes)
        objects += self._stand_ins("driver", functions, stand_ins(functions, newest))
        return self._link(DRIVER, [*objects, core], "cu*;")

    def _runtime_library(self, core: Path) -> Path:
        runtime = self._runtime
        objects = self._objects("runtime", sorted(SOURCES.glob("runtime_*.cpp")), self._includes)
        objects += self._stand_ins("runtime", runtime.symbols, stand_ins(runtime.symbols))
        exported = "cuda*; __cuda*;"
        return self._link(runtime.soname, [*objects, core], exported, runtime.version_node)

    def _nvml(self, core: Path) -> Path:
        objects = self._objects("nvml", sorted(SOURCES.glob("nvml*.cpp")), [])
        return self._link(NVML, [*objects, core], "nvml*;")


def build(variant: str = "release") -> Path:
    """Builds what is not up to date; returns the folder of the libraries.

    libsimgpu.so, libcuda.so.1, libcudart.so.N, libnvidia-ml.so.1, and the stand-ins for cuBLAS.

    Raises:
        BuildError: something that it needs is not installed, or does not compile.
    """
    runtime = find_runtime()
    headers = find_headers(runtime.major)
    folder = libraries_folder(variant)
    with native_build.locked(folder):
        builder = _Builder(variant, runtime, headers)
        targets = builder.all()
        targets += simgpu_blas.add(builder.manifest, targets[0], headers.folders)
        builder.manifest.write()
        advice = f"CUDA's headers are those in {', '.join(map(str, headers.folders))}."
        for target in targets:
            name = str(target.relative_to(folder))
            native_build.build(builder.manifest, name, f"{name} ({variant})", advice)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the simulated GPU.")
    parser.add_argument(
        "variant", choices=native_build.VARIANTS, nargs="?", default="release", help="how"
    )
    arguments = parser.parse_args()
    try:
        print(build(arguments.variant))
    except BuildError as error:
        print(f"trae_mem: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
