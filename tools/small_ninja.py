"""Reads the build.ninja that `native_build.py` writes and does it, where ninja is not installed.

A machine with a GPU often has torch and a compiler, and no network to install ninja from. This
knows what our own manifests use and nothing more: variables, rules with a command, build lines,
the compiler's dependency files. It does not notice changed flags: `make clean` then.

    python tools/small_ninja.py -f build/native/release/build.ninja TARGET
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

_REFERENCE = re.compile(r"\$(?:([$ :])|\{?(\w+)\}?)")
_WORDS = re.compile(r"(?:\$.|[^\s$])+")


@dataclass
class Edge:
    """One `build` line."""

    output: str
    rule: str
    inputs: list[str]
    variables: dict[str, str] = field(default_factory=dict)


class Manifest:
    """A parsed build.ninja."""

    def __init__(self, path: Path) -> None:
        self.variables: dict[str, str] = {}
        self.rules: dict[str, dict[str, str]] = {}
        self.edges: dict[str, Edge] = {}
        scope = self.variables
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("rule "):
                scope = self.rules.setdefault(line.removeprefix("rule ").strip(), {})
            elif line.startswith("build "):
                edge = self._edge(line.removeprefix("build "))
                self.edges[edge.output] = edge
                scope = edge.variables
            elif "=" in line:
                name, _, value = line.partition("=")
                target = scope if line[0] == " " else self.variables
                target[name.strip()] = value.strip()

    def _edge(self, text: str) -> Edge:
        # A colon in a path is written `$:`, so the first one without a dollar ends the output.
        output, inputs = re.split(r"(?<!\$):", text, maxsplit=1)
        rule, *names = _WORDS.findall(inputs)
        return Edge(self._plain(output.strip()), rule, [self._plain(name) for name in names])

    @staticmethod
    def _plain(path: str) -> str:
        return re.sub(r"\$([$ :])", r"\1", path)

    def expand(self, text: str, edge: Edge) -> str:
        """The text with every variable replaced."""
        known = {"in": " ".join(map(_quoted, edge.inputs)), "out": _quoted(edge.output)}

        def value(match: re.Match[str]) -> str:
            if match[1]:
                return match[1]
            name = match[2]
            if name in known:
                return known[name]
            found = edge.variables.get(name, self.variables.get(name, ""))
            return self.expand(found, edge)

        return _REFERENCE.sub(value, text)

    def command(self, edge: Edge) -> str:
        """What the shell runs for it."""
        return self.expand(self.rules[edge.rule]["command"], edge)


def _quoted(path: str) -> str:
    return path if re.fullmatch(r"[\w./+=-]+", path) else "'" + path.replace("'", "'\\''") + "'"


def _dependencies(edge: Edge) -> list[str] | None:
    """Files that the output was made from; None when nobody knows."""
    if edge.rule != "cxx":
        return edge.inputs
    try:
        text = Path(edge.output + ".d").read_text(encoding="utf-8")
    except OSError:
        return None
    return text.replace("\\\n", " ").partition(":")[2].split()


def _is_current(edge: Edge) -> bool:
    needed = _dependencies(edge)
    if needed is None:
        return False
    try:
        made = os.stat(edge.output).st_mtime_ns
        return all(os.stat(name).st_mtime_ns <= made for name in needed)
    except OSError:
        return False


def _run(manifest: Manifest, edge: Edge) -> bool:
    if _is_current(edge):
        return True
    Path(edge.output).parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(manifest.command(edge), shell=True, capture_output=True, text=True)
    if done.returncode != 0:
        Path(edge.output).unlink(missing_ok=True)
        print(f"FAILED: {edge.output}\n{done.stdout}{done.stderr}", file=sys.stderr)
    return done.returncode == 0


def build(manifest: Manifest, target: str, jobs: int) -> bool:
    """Brings the target up to date, what it is made from first; whether all went well."""
    edge = manifest.edges.get(target)
    if edge is None:
        raise SystemExit(f"small_ninja: nothing says how to make {target}")
    made = [manifest.edges[name] for name in edge.inputs if name in manifest.edges]
    libraries = [one for one in made if one.rule != "cxx"]
    if not all(build(manifest, one.output, jobs) for one in libraries):
        return False
    with ThreadPoolExecutor(jobs) as pool:
        compiled = [one for one in made if one.rule == "cxx"]
        if not all(list(pool.map(lambda one: _run(manifest, one), compiled))):
            return False
    return _run(manifest, edge)


def main() -> int:
    parser = argparse.ArgumentParser(description="Does what a build.ninja of this project says.")
    parser.add_argument("-f", dest="manifest", type=Path, required=True)
    parser.add_argument("-j", dest="jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quiet", action="store_true", help="accepted; there is no other way")
    parser.add_argument("targets", nargs="+")
    arguments = parser.parse_args()
    manifest = Manifest(arguments.manifest)
    return 0 if all(build(manifest, one, arguments.jobs) for one in arguments.targets) else 1


if __name__ == "__main__":
    sys.exit(main())
