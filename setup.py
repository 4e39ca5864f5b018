"""The native extension's hook into setuptools; everything else stands in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# An isolated build does not put the project's folder on the path.
sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))

import native_build


class NinjaBuildExt(build_ext):
    """Builds with `tools/native_build.py`, the same way as the Makefile does."""

    def build_extension(self, ext: Extension) -> None:
        try:
            built = native_build.build_extension()
        except native_build.BuildError as error:
            sys.exit(f"trae_mem: {error}")
        native_build.install(built, Path(self.get_ext_fullpath(ext.name)))


def relative(*patterns: str) -> list[str]:
    """The project's files that match, as the source archive needs them."""
    root = native_build.ROOT
    return sorted(str(path.relative_to(root)) for p in patterns for path in root.glob(p))


setup(
    ext_modules=[
        Extension(
            "trae_mem._native",
            sources=relative("csrc/core/*.cpp", "csrc/bindings/*.cpp"),
            depends=[*relative("csrc/**/*.h"), "tools/native_build.py"],
        )
    ],
    cmdclass={"build_ext": NinjaBuildExt},
)
