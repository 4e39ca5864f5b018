"""`make gpu-check`: builds for this machine's GPU, tests on it, measures on it.

For any Linux machine with an NVIDIA GPU, torch, Python 3.10 to 3.13 and a C++ compiler, without
network and without any other package. Everything is bounded: each scene is a process with a limit
of its own, and all of them end within `--minutes`. What was found is written to
`docs/results/<gpu>.json` and `.md` after every scene, so nothing is lost when it is cut short.

    python3 tools/gpu_check.py                       on a machine with a GPU
    python3 tools/gpu_check.py --sim A10 --quick     the same on a simulated one, as a rehearsal

Exit code: 0 when every scene that ran was right, 1 otherwise.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_report
import native_build

ROOT = native_build.ROOT
Result = dict[str, Any]


@dataclass(frozen=True)
class Scene:
    """One entry of the report."""

    name: str
    title: str
    seconds: int  # its limit
    mode: str = "dry"  # of the simulated GPU, in a rehearsal
    where: str = ""  # "module:function" that runs it in a process of its own


SCENES = (
    Scene("device", "the GPU", 60, where="trae_mem.bench.gpu_scenes:device"),
    Scene("native", "native tests of the CUDA device", 150),
    Scene(
        "parity",
        "streamed = resident, bit for bit",
        120,
        "numeric",
        "trae_mem.bench.gpu_parity:run",
    ),
    Scene("link", "the host link", 60, where="trae_mem.bench.gpu_scenes:link"),
    Scene("capped_7b", "7B, batch 8, in 24 GiB", 120, where="trae_mem.bench.gpu_scenes:capped_7b"),
    Scene("large_70b", "70B in 24 GiB", 120, where="trae_mem.bench.gpu_scenes:large_70b"),
    Scene("throughput", "tokens a second", 200, where="trae_mem.bench.gpu_scenes:throughput"),
)


class Check:
    """One run of all scenes."""

    def __init__(self, sim: str | None, quick: bool, minutes: float) -> None:
        self.sim, self.quick = sim, quick
        self.deadline = time.monotonic() + 60 * minutes
        self.report: Result = {
            "gpu_check": 1,
            "simulated": sim,
            "quick": quick,
            "environment": {
                "python": platform.python_version(),
                "system": f"{platform.system()} {platform.machine()}",
                "cores": len(os.sched_getaffinity(0)),
                "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            },
            "scenes": {},
        }

    def remaining(self) -> float:
        return self.deadline - time.monotonic()

    def run(self) -> bool:
        """All scenes; whether all that ran were right."""
        self._scene(Scene("build", "build for this Python", 240), self._build)
        if self.report["scenes"]["build"]["ok"]:
            for scene in SCENES:
                do = self._native if scene.name == "native" else self._child
                self._scene(scene, lambda limit, scene=scene, do=do: do(scene, limit))
        self.write(final=True)
        return all(scene["ok"] for scene in self.report["scenes"].values())

    def _scene(self, scene: Scene, do: Callable[[float], Result]) -> None:
        limit = min(scene.seconds, self.remaining())
        print(f"gpu-check: {scene.title} ...", flush=True)
        begin = time.monotonic()
        if limit < 5:
            found: Result = {"ok": False, "error": "not begun: the time for all scenes is over"}
        else:
            try:
                found = do(limit)
            except subprocess.TimeoutExpired:
                found = {"ok": False, "error": f"ended after {limit:.0f} s, its limit"}
        seconds = round(time.monotonic() - begin, 1)
        self.report["scenes"][scene.name] = {"title": scene.title, "seconds": seconds, **found}
        print(f"gpu-check:   {gpu_report.line(self.report['scenes'][scene.name])}", flush=True)
        self.write()

    # --- what the scenes do ----------------------------------------------------------------------

    def _build(self, limit: float) -> Result:
        command = [sys.executable, str(ROOT / "tools" / "native_build.py"), "extension"]
        found = _checked(command, limit)
        if self.sim is None or not found["ok"]:
            return found
        # The simulated GPU is compiled when it is first used: here, where there is time for it.
        used = [sys.executable, *self._simulator("numeric"), "-m", "platform"]
        return _checked(used, limit)

    def _native(self, scene: Scene, limit: float) -> Result:
        if native_build.find_googletest() is None:
            return {
                "ok": True,
                "skipped": "GoogleTest is not installed here (apt-get install libgtest-dev): the "
                "conformance suite of the CUDA device did NOT run",
            }
        if self.sim is not None:
            return {"ok": True, "skipped": "`make test-native` runs it on the simulated GPU"}
        command = [sys.executable, str(ROOT / "tools" / "native_tests.py"), "release"]
        return _checked([*command, "--gtest_filter=*Cuda*"], limit, {"TRAE_MEM_TEST_GPU": "1"})

    def _child(self, scene: Scene, limit: float) -> Result:
        """The scene's function in a process of its own; its result comes back through a file."""
        with tempfile.TemporaryDirectory(prefix="trae-mem-") as folder:
            path = Path(folder) / "result.json"
            command = [sys.executable, *self._simulator(scene.mode), __file__]
            command += ["--scene", scene.where, "--result", str(path)]
            if self.quick:
                command.append("--quick")
            if self.sim is not None:
                command += ["--sim", self.sim]
            done = _checked(command, limit)
            if path.exists():
                found: Result = json.loads(path.read_text(encoding="utf-8"))
                return {"ok": True, **found}
            return {**done, "ok": False}

    def _simulator(self, mode: str) -> list[str]:
        if self.sim is None:
            return []
        pace = ["--pace"] if mode == "dry" else []
        return ["-m", "trae_mem.sim", "--gpu", self.sim, "--mode", mode, *pace]

    # --- the report -----------------------------------------------------------------------------

    def write(self, *, final: bool = False) -> None:
        device = self.report["scenes"].get("device", {})
        name = device.get("name") or "unknown GPU"
        if self.sim is not None:
            name = f"simulated {self.sim}"
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        # A rehearsal's results are of no interest to anyone else.
        folder = ROOT / ("build/gpu-check" if self.sim else "docs/results")
        folder.mkdir(parents=True, exist_ok=True)
        if name == "unknown GPU" and not final:
            return
        path = folder / f"{slug}.json"
        path.write_text(json.dumps(self.report, indent=1) + "\n", encoding="utf-8")
        text = gpu_report.markdown(name, self.report)
        path.with_suffix(".md").write_text(text, encoding="utf-8")
        if final:
            print(f"gpu-check: {path.relative_to(ROOT)} and {path.stem}.md")


def _checked(command: list[str], limit: float, environment: dict[str, str] | None = None) -> Result:
    """Runs it within the limit, its whole group ended at the limit; the end of what it said."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        raise
    if process.returncode == 0:
        return {"ok": True}
    tail = "\n".join(output.strip().splitlines()[-15:])
    print(tail, file=sys.stderr)
    error = tail.splitlines()[-1] if tail else ""
    return {"ok": False, "error": f"exit code {process.returncode}: {error}"}


def _run_scene(where: str, result: Path, *, simulated: bool, quick: bool) -> None:
    """In the scene's own process."""
    module, _, name = where.partition(":")
    function = getattr(importlib.import_module(module), name)
    found = function(simulated=simulated, quick=quick)
    result.write_text(json.dumps(found), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks trae_mem on this machine's GPU.")
    parser.add_argument("--sim", metavar="CARD", help="rehearse on a simulated card, say A10")
    parser.add_argument("--quick", action="store_true", help="smaller scenes")
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything together")
    parser.add_argument("--scene", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.scene:
        simulated = arguments.sim is not None
        _run_scene(arguments.scene, arguments.result, simulated=simulated, quick=arguments.quick)
        return 0
    if importlib.util.find_spec("torch") is None:
        print(f"gpu-check: {sys.executable} has no torch. Install it: pip install torch.")
        return 1
    return 0 if Check(arguments.sim, arguments.quick, arguments.minutes).run() else 1


if __name__ == "__main__":
    sys.exit(main())
