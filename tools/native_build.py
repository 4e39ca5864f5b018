"""Builds the native code with ninja: the extension module and the native tests.

`setup.py` and the Makefile both come through here, so compilers' flags stand in one place. Sources
are found by pattern (`csrc/core`, `csrc/bindings`, `csrc/tests`). Each variant has a folder of its
own, `build/native/<variant>`, with one build.ninja; headers are tracked by the compiler's
dependency files. `CXX`, `CXXFLAGS`, `LDFLAGS` and `MAX_JOBS` are honoured. Standard library only.

    python tools/native_build.py extension          build it and put it beside the Python package
    python tools/native_build.py tests asan         build build/native/asan/native_tests
    python tools/native_build.py compile-commands   write build/native/compile_commands.json
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import filecmp
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "native"
EXTENSION_NAME = "_native" + (sysconfig.get_config_var("EXT_SUFFIX") or ".so")

WARNINGS = (
    *("-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion"),
    "-Wno-sign-conversion",  # part of -Wconversion for clang, not for gcc
)
COMMON = ("-std=c++20", "-g1", "-fPIC", "-fvisibility=hidden", "-pthread")
# The reports' call stacks are found by frame pointers.
SANITIZED = ("-O1", "-fno-omit-frame-pointer", "-D_GLIBCXX_ASSERTIONS", "-Werror")

# Where distributions put GoogleTest's own source: compiled here, it is sanitized like the rest.
GTEST_SOURCES = (Path("/usr/src/googletest/googletest"), Path("/usr/src/gtest"))
GTEST_HEADER = "gtest/gtest.h"
GTEST_PREFIXES = (Path("/usr"), Path("/usr/local"))


@dataclass(frozen=True)
class Variant:
    """How one set of objects is compiled; `link` flags are repeated for the linker."""

    compile: tuple[str, ...]
    link: tuple[str, ...] = ()


_ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_THREAD = ("-fsanitize=thread",)

VARIANTS = {
    # Warnings stay warnings here: a user's compiler may know new ones.
    "release": Variant(compile=("-O2",)),
    "asan": Variant(compile=(*SANITIZED, *_ADDRESS), link=_ADDRESS),
    "tsan": Variant(compile=(*SANITIZED, *_THREAD), link=_THREAD),
}


class BuildError(RuntimeError):
    """The native code could not be built; the message says what to install."""


class CompileError(BuildError):
    """The compiler or linker found an error; everything that is needed is installed."""


def compiler() -> str:
    """`$CXX`, or the first of g++, clang++ and c++ that is installed."""
    chosen = os.environ.get("CXX")
    candidates = [chosen] if chosen else ["g++", "clang++", "c++"]
    for candidate in candidates:
        if shutil.which(shlex.split(candidate)[0]):
            return candidate
    raise BuildError(
        f"No C++ compiler: {' or '.join(candidates)} not found. "
        "Install one: apt-get install -y g++ (Fedora: dnf install gcc-c++)."
    )


def find_ninja() -> list[str]:
    """The `ninja` of the Python package, the one on the PATH, or our own stand-in for it."""
    if importlib.util.find_spec("ninja") is not None:
        import ninja

        candidate = Path(ninja.BIN_DIR) / "ninja"
        if candidate.exists():
            return [str(candidate)]
    found = shutil.which("ninja")
    if found is None:
        return [sys.executable, str(ROOT / "tools" / "small_ninja.py")]
    return [found]


def python_includes() -> tuple[Path, Path]:
    """The folders of Python.h and of pybind11's headers."""
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise BuildError(
            f"Python.h of Python {version} is not in {python}. "
            f"Install it: apt-get install -y python{version}-dev "
            "(Fedora: dnf install python3-devel)."
        )
    if importlib.util.find_spec("pybind11") is not None:
        import pybind11

        return python, Path(pybind11.get_include())
    # torch brings pybind11's headers along, for extensions of its own.
    torch = importlib.util.find_spec("torch")
    for place in (torch.submodule_search_locations or []) if torch else []:
        if (Path(place) / "include" / "pybind11" / "pybind11.h").exists():
            return python, Path(place) / "include"
    raise BuildError("pybind11 is missing. Install it: pip install 'pybind11>=2.13' ninja.")


@dataclass(frozen=True)
class GoogleTest:
    """An installed GoogleTest: its source where there is one, else the library to link."""

    source: Path | None


def find_googletest() -> GoogleTest | None:
    if not any((prefix / "include" / GTEST_HEADER).exists() for prefix in GTEST_PREFIXES):
        return None
    for folder in GTEST_SOURCES:
        if (folder / "src" / "gtest-all.cc").exists():
            return GoogleTest(folder)
    return GoogleTest(None)


class Manifest:
    """The text of one build.ninja.

    `part` is a folder in the variant's, with a build.ninja and a lock of its own.
    """

    def __init__(self, variant: str, part: str = "") -> None:
        self.folder = BUILD / variant / part
        flags = VARIANTS[variant]
        user_compile = shlex.split(os.environ.get("CXXFLAGS", ""))
        user_link = shlex.split(os.environ.get("LDFLAGS", ""))
        compile_flags = [*COMMON, *flags.compile, "-Icsrc"]
        self._lines = [
            "ninja_required_version = 1.5",
            f"builddir = {_path(self.folder)}",
            f"compile = {_value(compiler())} {_words(compile_flags)}",
            f"user = {_words(user_compile)}",
            "rule cxx",
            "  command = $compile $flags $user -MMD -MF $out.d -c $in -o $out",
            "  description = c++ $in",
            "  depfile = $out.d",
            "  deps = gcc",
            "rule link",
            f"  command = {_value(compiler())} -pthread {_words(flags.link)} $flags $in -o $out "
            f"{_words(user_link)} $libraries -ldl",
            "  description = link $out",
        ]

    def objects(self, group: str, sources: Iterable[Path], flags: Iterable[str]) -> list[Path]:
        """Compiles each source to `obj/<group>/<name>.o`."""
        words = _words(flags)
        made = []
        for source in sources:
            target = self.folder / "obj" / group / (source.name + ".o")
            self._lines += [f"build {_path(target)}: cxx {_path(source)}", f"  flags = {words}"]
            made.append(target)
        return made

    def link(
        self, name: str, objects: Iterable[Path], flags: Iterable[str], libraries: Iterable[str]
    ) -> None:
        """Links `objects` to `<variant>/<name>`; `ninja NAME` builds it."""
        target = self.folder / name
        self._lines += [
            f"build {_path(target)}: link {' '.join(map(_path, objects))}",
            f"  flags = {_words(flags)}",
            f"  libraries = {_words(libraries)}",
        ]

    def write(self) -> None:
        path = self.folder / "build.ninja"
        path.write_text("\n".join(self._lines) + "\n", encoding="utf-8")

    def ninja(self) -> list[str]:
        """The command that reads this manifest, to be run in the project's folder."""
        return [*find_ninja(), "-f", str((self.folder / "build.ninja").relative_to(ROOT))]


def _path(path: Path) -> str:
    """A path as ninja reads it in a build line; ninja quotes it for the shell itself.

    Relative to the project, where ninja runs: messages are short, and a folder that is moved or
    copied need not be compiled again.
    """
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return re.sub(r"([$ :])", r"$\1", str(shown))


def _value(text: str) -> str:
    return text.replace("$", "$$")


def _words(words: Iterable[str]) -> str:
    return _value(shlex.join(words))


def _sources(folder: str) -> list[Path]:
    found = sorted((ROOT / "csrc" / folder).glob("*.cpp"))
    if not found:
        raise BuildError(f"no csrc/{folder}/*.cpp in {ROOT}: the checkout is not complete.")
    return found


def _add_extension(manifest: Manifest, core: list[Path]) -> None:
    python, pybind11 = python_includes()
    flags = ["-isystem", str(python), "-isystem", str(pybind11)]
    # One folder for each Python, so that two of them do not compile each other's objects away.
    group = f"bindings-{sys.implementation.cache_tag}"
    bindings = manifest.objects(group, _sources("bindings"), [*WARNINGS, *flags])
    manifest.link(EXTENSION_NAME, [*core, *bindings], ["-shared"], [])


def _add_tests(manifest: Manifest, core: list[Path]) -> None:
    googletest = find_googletest()
    if googletest is None:
        raise BuildError(
            "GoogleTest not found. Install it: apt-get install -y libgtest-dev "
            "(Fedora: dnf install gtest-devel)."
        )
    tests = manifest.objects("tests", _sources("tests"), [*WARNINGS, "-Werror"])
    if googletest.source is None:
        manifest.link("native_tests", [*core, *tests], [], ["-lgtest", "-lgtest_main"])
        return
    sources = [googletest.source / "src" / name for name in ("gtest-all.cc", "gtest_main.cc")]
    library = manifest.objects("googletest", sources, ["-w", "-O0", f"-I{googletest.source}"])
    manifest.link("native_tests", [*core, *tests, *library], [], [])


def _write_manifest(variant: str, *, extension: bool, tests: bool) -> Manifest:
    manifest = Manifest(variant)
    core = manifest.objects("core", _sources("core"), WARNINGS)
    if extension:
        _add_extension(manifest, core)
    if tests:
        _add_tests(manifest, core)
    manifest.write()
    return manifest


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Two builds of one variant at once would write each other's files."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _understands_cpp20() -> bool:
    probe = "#include <concepts>\n#include <span>\n#include <thread>\nstd::jthread thread;\n"
    command = [*shlex.split(compiler()), "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    return subprocess.run(command, input=probe, text=True, capture_output=True).returncode == 0


def _advice() -> str:
    if not _understands_cpp20():
        return (
            f"{compiler()} does not compile C++20. Install g++ 11 or newer and name it, "
            "for example: apt-get install -y g++-12, then CXX=g++-12."
        )
    return (
        "Above is what the compiler said. If a system header or library is missing: "
        "apt-get install -y g++ python3-dev libgtest-dev."
    )


def build(manifest: Manifest, name: str, what: str, advice: str = "") -> Path:
    """Brings `name` of a manifest that is written up to date, within `locked`; returns its path."""
    target = manifest.folder / name
    command = manifest.ninja()
    if not sys.stdout.isatty():
        command.append("--quiet")
    if jobs := os.environ.get("MAX_JOBS"):
        command += ["-j", jobs]
    command.append(str(target.relative_to(ROOT)))
    # make's job server does not reach through pip or a plain recipe, and ninja would complain.
    env = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    if subprocess.run(command, cwd=ROOT, env=env).returncode != 0:
        kind = CompileError if _understands_cpp20() else BuildError
        raise kind(f"building {what} failed. {advice or _advice()}")
    return target


def _build(variant: str, name: str, *, extension: bool = False, tests: bool = False) -> Path:
    with locked(BUILD / variant):
        manifest = _write_manifest(variant, extension=extension, tests=tests)
        return build(manifest, name, f"{name} ({variant})")


def build_extension() -> Path:
    """Builds the extension module for the running Python; returns its path in the build folder."""
    return _build("release", EXTENSION_NAME, extension=True)


def build_tests(variant: str) -> Path:
    """Builds the native tests in one of `VARIANTS`; returns the program's path."""
    return _build(variant, "native_tests", tests=True)


def install(built: Path, target: Path) -> None:
    """Puts `built` at `target`; a process that has the old file loaded keeps it whole."""
    if target.exists() and filecmp.cmp(built, target, shallow=False):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(target.name + ".new")
    shutil.copy2(built, fresh)
    os.replace(fresh, target)


def write_compile_commands() -> Path:
    """Writes compile_commands.json (release flags, every source) for clang-tidy and editors."""
    with locked(BUILD / "release"):
        manifest = _write_manifest("release", extension=True, tests=True)
        command = [*manifest.ninja(), "-t", "compdb", "cxx"]
        path = BUILD / "compile_commands.json"
        done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)
        path.write_bytes(done.stdout)
        return path


def main() -> int:
    parser = argparse.ArgumentParser(description="Build trae_mem's native code.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("extension", help="build the extension module into trae_mem/")
    tests = verbs.add_parser("tests", help="build the native tests")
    tests.add_argument("variant", choices=VARIANTS)
    verbs.add_parser("compile-commands", help="write build/native/compile_commands.json")
    arguments = parser.parse_args()
    try:
        if arguments.verb == "extension":
            install(build_extension(), ROOT / "trae_mem" / EXTENSION_NAME)
        elif arguments.verb == "tests":
            print(build_tests(arguments.variant))
        else:
            print(write_compile_commands())
    except BuildError as error:
        print(f"trae_mem: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
