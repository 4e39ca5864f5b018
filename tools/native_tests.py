"""Builds and runs the native tests in one variant: release, asan (with UBSan) or tsan.

    python tools/native_tests.py tsan [GoogleTest's own options]

The tests of `CudaDevice` run on the simulated GPU, which is built in the same variant, or, with
`TRAE_MEM_TEST_GPU=1`, on the machine's own. Where the simulator cannot be built for want of CUDA's
headers or torch's CUDA build, they are skipped, and say so.

The sanitizers need things that some containers and kernels withhold. A trial run that only lists
the tests finds out, so that a real failure is never mistaken for a machine that cannot run them.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import native_build
import simgpu_build

# A deadlock must end the run, not the patience of whoever waits for it.
TIME_LIMIT_SECONDS = 900

SANITIZER_OPTIONS = {
    "release": {},
    "asan": {
        "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1:strict_string_checks=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    },
    "tsan": {"TSAN_OPTIONS": "second_deadlock_stack=1"},
}
assert SANITIZER_OPTIONS.keys() == native_build.VARIANTS.keys()

# Two GPUs with more memory than the tests ask for.
SIMULATED = "gpu=Simulated A10,devices=2,memory=4294967296,mode=numeric"

NO_LEAK_CHECK = "LeakSanitizer has encountered a fatal error"  # it may not use ptrace here
NO_SHADOW = "unexpected memory mapping"  # more random address bits than gcc's TSan foresees


def environment(variant: str) -> dict[str, str]:
    """This process's environment with the sanitizers' options, behind which the user's come."""
    merged = dict(os.environ)
    for name, options in SANITIZER_OPTIONS[variant].items():
        user = os.environ.get(name)
        merged[name] = f"{options}:{user}" if user else options
    return merged


def provide_gpu(variant: str, env: dict[str, str]) -> None:
    """Tells the tests in `env` where the simulated GPU is, or why there is none.

    Raises:
        native_build.CompileError: it does not compile.
    """
    if env.get("TRAE_MEM_TEST_GPU"):
        print("note: the tests of CudaDevice run on this machine's GPU")
        return
    try:
        folder = simgpu_build.build(variant)
    except native_build.CompileError:
        raise
    except native_build.BuildError as missing:
        print(f"note: the tests of CudaDevice are skipped: {missing}")
        env["TRAE_MEM_SIM_MISSING"] = str(missing)
        return
    env["TRAE_MEM_SIM_LIBRARIES"] = str(folder)
    env["TRAE_MEM_SIM"] = SIMULATED


def trial(command: list[str], env: dict[str, str]) -> str:
    """What a run that only lists the tests says; empty when it went well."""
    listing = [*command, "--gtest_list_tests"]
    done = subprocess.run(listing, env=env, text=True, capture_output=True, timeout=120)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def adapted(program: Path, env: dict[str, str]) -> list[str]:
    """The command that runs `program` on this machine; turns off in `env` what cannot work."""
    command = [str(program)]
    complaint = trial(command, env)
    if NO_SHADOW in complaint and shutil.which("setarch"):
        print("note: run without address randomisation, which this kernel makes too wide for TSan")
        command = ["setarch", platform.machine(), "-R", *command]
        complaint = trial(command, env)
    if NO_LEAK_CHECK in complaint:
        print("note: leaks are not checked, LeakSanitizer may not use ptrace on this machine")
        env["ASAN_OPTIONS"] += ":detect_leaks=0"
        complaint = trial(command, env)
    if complaint:
        print(complaint, file=sys.stderr)
    if NO_SHADOW in complaint:
        raise native_build.BuildError(
            "TSan does not run on this kernel, nor under setarch -R. "
            "As root: sysctl vm.mmap_rnd_bits=28."
        )
    return command


def run(variant: str, options: list[str]) -> int:
    """Builds and runs; returns the exit status."""
    program = native_build.build_tests(variant)
    env = environment(variant)
    provide_gpu(variant, env)
    report = native_build.ROOT / "build" / "test-results" / f"native-{variant}.xml"
    report.unlink(missing_ok=True)  # a run that crashes writes none
    own = ["--gtest_brief=1", f"--gtest_output=xml:{report}"]
    command = [*adapted(program, env), *own, *options]
    sys.stdout.flush()
    try:
        status = subprocess.run(command, env=env, timeout=TIME_LIMIT_SECONDS).returncode
    except subprocess.TimeoutExpired:
        print(f"trae_mem: no end after {TIME_LIMIT_SECONDS} s, stopped.", file=sys.stderr)
        return 1
    if status < 0:
        print(f"trae_mem: {program.name} ({variant}) died of signal {-status}.", file=sys.stderr)
    return 1 if status else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Build and run the native tests.")
    parser.add_argument("variant", choices=native_build.VARIANTS)
    arguments, options = parser.parse_known_args()
    try:
        return run(arguments.variant, options)
    except native_build.BuildError as error:
        print(f"trae_mem: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
