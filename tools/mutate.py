"""Takes each wait, record, release and check out of a copy of the project, one at a time, and
requires that a test fails.

    python tools/mutate.py              all mutants
    python tools/mutate.py NAME …       these

A mutant that survives is a missing test. Prints a Markdown table; exit code 1 if one survived.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / "build" / "mutants"
TIME_LIMIT_SECONDS = 900  # a mutant may hang: that is noticed too

STREAMER = "csrc/core/layer_streamer.cpp"
STAGING = "csrc/core/staging_ring.cpp"
CUDA = "csrc/core/cuda_device.cpp"
NATIVE = ("{python}", "tools/native_tests.py", "release", "--gtest_filter=*Streamer*")

NATIVE_CUDA = (*NATIVE[:-1], "--gtest_filter=*Cuda*:*Streamer*:HostCalls*")


def pytest(*files: str) -> tuple[str, ...]:
    """pytest on these files, up to the first failure."""
    return ("{python}", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *files)


PARITY = pytest("tests/test_parity.py")
# On the simulated GPU, with one of the 20 seeds: the others would only find it later.
GPU_PARITY = pytest("tests/test_cuda_parity.py", "-k", "not nothing_depends or reentrant-0")


@dataclass(frozen=True)
class Mutant:
    """One change of the code, and the tests of which each must notice."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[tuple[str, ...], ...]


MUTANTS = (
    Mutant(
        "acquire does not wait for the load",
        STREAMER,
        "  device_->wait(stream, load->end.handle());\n",
        "",
        (NATIVE, PARITY, GPU_PARITY),
    ),
    Mutant(
        "a load does not wait for the uses of its slot",
        STREAMER,
        "  wait_for_uses(slot);\n  device_->mark(load->begin.handle(), copies);\n",
        "  device_->mark(load->begin.handle(), copies);\n",
        (NATIVE, GPU_PARITY),
    ),
    Mutant(
        "the copy stream does not wait for a use",
        STREAMER,
        "    device_->wait(copy_stream_.handle(), use.released.handle());\n",
        "",
        (NATIVE, GPU_PARITY),
    ),
    Mutant(
        "release records no event",
        STREAMER,
        "  device_->record(use.released.handle(), stream);\n",
        "",
        (NATIVE, GPU_PARITY),
    ),
    Mutant(
        "release forgets that there is something to wait for",
        STREAMER,
        "  use.pending = true;\n",
        "",
        (NATIVE, GPU_PARITY),
    ),
    Mutant(
        "all streams share one release",
        STREAMER,
        "    if (use.stream == stream) return use;\n",
        "    return use;\n",
        (NATIVE, GPU_PARITY),
    ),
    Mutant(
        "no event is recorded behind a load",
        STREAMER,
        "  device_->record(load->end.handle(), copies);\n",
        "",
        (NATIVE, GPU_PARITY),
    ),
    Mutant(
        "poison does not wait for the uses",
        STREAMER,
        "    wait_for_uses(slot);\n    drop(slot);\n",
        "    drop(slot);\n",
        (NATIVE, GPU_PARITY),
    ),
    Mutant(
        "poison does not make the slot stale",
        STREAMER,
        "    wait_for_uses(slot);\n    drop(slot);\n",
        "    wait_for_uses(slot);\n",
        (NATIVE, GPU_PARITY),
    ),
    Mutant(
        "prefetch evicts units that are in use or needed sooner",
        STREAMER,
        "      if (*owner == unit || units_[*owner].acquired() || sooner) break;\n",
        "      static_cast<void>(sooner);\n",
        (NATIVE,),
    ),
    Mutant(
        "invalidate does nothing",
        STREAMER,
        "  if (holds(unit)) drop(slots_[units_[unit].slot]);\n",
        "",
        (NATIVE, pytest("tests/test_changes.py")),
    ),
    Mutant(
        "a file is read into a staging buffer that is still being copied",
        STAGING,
        "    check(driver_.cuStreamWaitEvent(reading_.pointer(), stage.freed.pointer(), 0),\n"
        '          "cuStreamWaitEvent");\n',
        "",
        (NATIVE_CUDA,),
    ),
    Mutant(
        "a staging buffer is copied before it is filled",
        STAGING,
        "  check(driver_.cuStreamWaitEvent(stream, stage.filled.pointer(), 0),"
        ' "cuStreamWaitEvent");\n',
        "",
        (NATIVE_CUDA,),
    ),
    Mutant(
        "memory that is not pinned is read before the stream's earlier work",
        STAGING,
        "  context_->check(driver_.cuStreamWaitEvent(reading_.pointer(), entry_.pointer(), 0),"
        ' "copy",\n                  "cuStreamWaitEvent");\n',
        "",
        (NATIVE_CUDA,),
    ),
    Mutant(
        "a wait does not wait for what must be read",
        CUDA,
        '      await(work, state->event.pointer(), "wait");\n',
        "",
        (NATIVE_CUDA,),
    ),
    Mutant(
        "a failure does not travel through a wait",
        CUDA,
        "  add_work(stream, travelling);\n",
        "",
        (NATIVE_CUDA,),
    ),
    Mutant(
        "a stream's wait for an event is left out",
        CUDA,
        "    context_->check(driver_.cuStreamWaitEvent(pointer, state->event.pointer(), 0),"
        ' "wait",\n                    "cuStreamWaitEvent");\n',
        "",
        (NATIVE_CUDA, GPU_PARITY),
    ),
    Mutant(
        "what does not stream is not put back when disabling fails",
        "trae_mem/runtime.py",
        "        try:\n            self.streamer.drain()\n        finally:\n"
        "            self.placement.restore()\n",
        "        self.streamer.drain()\n        self.placement.restore()\n",
        (pytest("tests/test_cuda_placement.py"),),
    ),
    Mutant(
        "a second stream of a unit does not acquire it",
        "trae_mem/runtime.py",
        "                self.streamer.acquire(hooks.index, stream, travel)\n            return\n",
        "            return\n",
        (GPU_PARITY,),
    ),
    Mutant(
        "only the first stream of a unit releases it",
        "trae_mem/runtime.py",
        "        for stream in self._streams:\n",
        "        for stream in self._streams[:1]:\n",
        (GPU_PARITY,),
    ),
    Mutant(
        "units of a group that is recomputed are put to rest at once",
        "trae_mem/runtime.py",
        "            self._still_shown.append(current)\n",
        "            pass\n",
        (pytest("tests/test_cuda_hot_path.py"),),
    ),
    Mutant(
        "the version of a weight at rest is not compared",
        "trae_mem/hooks.py",
        "            if tensor._version != version or tensor.data_ptr() != address:\n",
        "            if tensor.data_ptr() != address:\n",
        (pytest("tests/test_changes.py"),),
    ),
    Mutant(
        "the address of a weight at rest is not compared",
        "trae_mem/hooks.py",
        "            if tensor._version != version or tensor.data_ptr() != address:\n",
        "            if tensor._version != version:\n",
        (pytest("tests/test_changes.py"),),
    ),
    Mutant(
        "a changed unit is not loaded again",
        "trae_mem/runtime.py",
        "        self.streamer.invalidate(hooks.index)\n",
        "",
        (pytest("tests/test_changes.py"),),
    ),
    Mutant(
        "a recomputed unit is released at the end of its forward",
        "trae_mem/hooks.py",
        "        if self.depth == 0 and not in_backward():\n",
        "        if self.depth == 0:\n",
        (pytest("tests/test_parity_patterns.py"),),
    ),
    Mutant(
        "a unit is released as soon as its backward begins",
        "trae_mem/hooks.py",
        "        self.runtime.backward(self)\n",
        "        self.runtime.backward(self)\n        self.runtime.release(self)\n",
        (PARITY, GPU_PARITY),
    ),
    Mutant(
        "backward does not acquire",
        "trae_mem/hooks.py",
        "        self.runtime.backward(self)\n",
        "        pass\n",
        (PARITY, GPU_PARITY),
    ),
    Mutant(
        "the end of backward releases nothing",
        "trae_mem/runtime.py",
        "        torch.autograd.Variable._execution_engine.queue_callback(self.end_pass)\n",
        "",
        (pytest("tests/test_parity.py", "tests/test_changes.py", "tests/test_recorder.py"),),
    ),
    Mutant(
        "acquiring a unit does not release the current one",
        "trae_mem/runtime.py",
        "            return\n        self.release_current()\n",
        "            return\n",
        (PARITY, GPU_PARITY),
    ),
    Mutant(
        "what a unit writes to its buffers is not kept",
        "trae_mem/runtime.py",
        "        self.written_back_bytes += hooks.keep_writes()\n",
        "",
        (pytest("tests/test_block_weights.py"),),
    ),
)


def make_copy() -> None:
    """A fresh copy of the files that git knows, with build folders kept for speed."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    for name in filter(None, listed):
        target = COPY / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_bytes() != (ROOT / name).read_bytes():
            shutil.copy(ROOT / name, target)


def run(command: tuple[str, ...]) -> tuple[bool, str]:
    """Runs a test command in the copy; whether it passed, and its output."""
    filled = [word.format(python=sys.executable) for word in command]
    # In front of the installed project, which is the one that is not mutated.
    env = dict(os.environ, PYTHONPATH=str(COPY))
    build = [sys.executable, "tools/native_build.py", "extension"]
    try:
        if "pytest" in command:
            subprocess.run(build, cwd=COPY, env=env, check=True, capture_output=True)
        done = subprocess.run(
            filled, cwd=COPY, env=env, text=True, capture_output=True, timeout=TIME_LIMIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return False, "hangs"
    return done.returncode == 0, done.stdout + done.stderr


def first_failure(output: str) -> str:
    """The name of the first test that failed."""
    for line in output.splitlines():
        if line.startswith(("[  FAILED  ] ", "FAILED ", "ERROR ")):
            name = line.removeprefix("[  FAILED  ] ").removeprefix("FAILED ").removeprefix("ERROR ")
            return name.split(" ")[0].rstrip(",")
    return output.strip().splitlines()[-1][:100] if output.strip() else "no output"


def try_mutant(mutant: Mutant) -> tuple[bool, str]:
    """Whether the mutant was noticed, and by what."""
    file = COPY / mutant.file
    original = file.read_text(encoding="utf-8")
    if original.count(mutant.old) != 1:
        return (
            False,
            f"SURVIVED: {mutant.file} has this {original.count(mutant.old)} times, not once",
        )
    try:
        file.write_text(original.replace(mutant.old, mutant.new), encoding="utf-8")
        outcomes = [run(tests) for tests in mutant.tests]
    finally:
        file.write_text(original, encoding="utf-8")
    seen = ["SURVIVED" if passed else f"`{first_failure(output)}`" for passed, output in outcomes]
    return not any(passed for passed, _ in outcomes), ", ".join(seen)


def main() -> int:
    chosen = [m for m in MUTANTS if not sys.argv[1:] or m.name in sys.argv[1:]]
    make_copy()
    for tests in dict.fromkeys(tests for mutant in chosen for tests in mutant.tests):
        passed, output = run(tests)
        if not passed:
            print(output, file=sys.stderr)
            print(f"trae_mem: {' '.join(tests)} fails without a mutant", file=sys.stderr)
            return 1
    print("| taken out | noticed by |\n|---|---|", flush=True)
    survived = 0
    begin = time.monotonic()
    for mutant in chosen:
        killed, by = try_mutant(mutant)
        survived += not killed
        print(f"| {mutant.name} | {by} |", flush=True)
    print(f"\n{len(chosen) - survived} of {len(chosen)} noticed, {time.monotonic() - begin:.0f} s")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
