"""What `make gpu-check` needs where nothing can be installed: a stand-in for ninja, its report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gpu_report
import pytest
import small_ninja

ROOT = Path(__file__).resolve().parent.parent

MANIFEST = """ninja_required_version = 1.5
builddir = out
compile = printf '%s$$x\\n'
user =
rule cxx
  command = $compile $flags $user > $out && cat $in >> $out && printf '%s: %s' $out $in > $out.d
  depfile = $out.d
  deps = gcc
rule link
  command = cat $in > $out $libraries
build out/a$ b.o: cxx source$:one
  flags = first
build out/two.o: cxx two
  flags = second
build out/all: link out/a$ b.o out/two.o
  flags =
  libraries =
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sources, and the manifest that makes one file of them."""
    (tmp_path / "build.ninja").write_text(MANIFEST, encoding="utf-8")
    (tmp_path / "source:one").write_text("one\n", encoding="utf-8")
    (tmp_path / "two").write_text("two\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def build() -> int:
    command = [sys.executable, str(ROOT / "tools" / "small_ninja.py"), "-f", "build.ninja"]
    return subprocess.run([*command, "--quiet", "out/all"], check=False).returncode


def test_the_stand_in_for_ninja_does_what_the_manifest_says(project: Path) -> None:
    assert build() == 0
    made = (project / "out" / "all").read_text(encoding="utf-8")
    assert made == "first$x\none\nsecond$x\ntwo\n"


def test_the_stand_in_makes_only_what_is_older_than_its_sources(project: Path) -> None:
    assert build() == 0
    before = {path.name: path.stat().st_mtime_ns for path in (project / "out").iterdir()}
    assert build() == 0
    assert {path.name: path.stat().st_mtime_ns for path in (project / "out").iterdir()} == before
    (project / "two").write_text("three\n", encoding="utf-8")
    assert build() == 0
    after = {path.name: path.stat().st_mtime_ns for path in (project / "out").iterdir()}
    assert after["a b.o"] == before["a b.o"]
    assert after["two.o"] > before["two.o"]
    assert (project / "out" / "all").read_text(encoding="utf-8").endswith("three\n")


def test_a_command_that_fails_leaves_no_output_and_ends_the_build(project: Path) -> None:
    (project / "two").unlink()
    assert build() == 1
    assert not (project / "out" / "two.o").exists()
    assert not (project / "out" / "all").exists()


def test_the_stand_in_reads_what_native_build_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import native_build

    monkeypatch.setattr(native_build, "BUILD", tmp_path)
    monkeypatch.setenv("CXX", "sh --option")
    (tmp_path / "release").mkdir()
    manifest = native_build.Manifest("release")
    source = native_build.ROOT / "csrc" / "core" / "options.cpp"
    made = manifest.objects("group", [source], ["-DNAME=a b", "-Wl,-rpath,$ORIGIN"])
    manifest.link("result.so", made, ["-shared"], ["-lm"])
    manifest.write()
    parsed = small_ninja.Manifest(tmp_path / "release" / "build.ninja")
    compile_, link = parsed.edges.values()
    assert compile_.inputs == ["csrc/core/options.cpp"]
    command = parsed.command(compile_)
    assert command.startswith("sh --option -std=c++20")
    assert "'-DNAME=a b' '-Wl,-rpath,$ORIGIN'" in command
    assert command.endswith(f"-c csrc/core/options.cpp -o {compile_.output}")
    assert parsed.command(link).endswith(f"-shared {compile_.output} -o {link.output}  -lm -ldl")


RUN = {
    "batch": 8,
    "steps": 1,
    "out_of_memory": None,
    "allocated_bytes": 1 << 30,
    "reserved_bytes": 2 << 30,
    "step_seconds": 2.0,
    "tokens_per_second": 8192.0,
}


def test_the_report_shows_what_ran_what_was_skipped_and_what_went_wrong() -> None:
    report = {
        "simulated": None,
        "environment": {
            "python": "3.12.1",
            "system": "Linux x86_64",
            "cores": 16,
            "memory_bytes": 128 << 30,
        },
        "scenes": {
            "native": {"title": "native tests", "ok": True, "seconds": 0.0, "skipped": "no gtest"},
            "parity": {
                "title": "parity",
                "ok": False,
                "seconds": 3.0,
                "failed": 1,
                "cases": [
                    {
                        "dtype": "float32",
                        "checkpointing": "none",
                        "store": "ram",
                        "debug": None,
                        "difference": "loss 2 differs",
                    }
                ],
            },
            "large_70b": {
                "title": "70B",
                "ok": True,
                "seconds": 9.0,
                "cap_bytes": 24 << 30,
                "slots_bytes": 3 << 30,
                "weights": "bf16",
                **RUN,
            },
            "throughput": {"title": "tokens", "ok": False, "seconds": 200.0, "error": "ended"},
        },
    }
    text = gpu_report.markdown("NVIDIA Something", json.loads(json.dumps(report)))
    assert text.startswith("# NVIDIA Something\n")
    assert "| native tests | SKIPPED: no gtest |" in text
    assert "- float32, none, ram, None: loss 2 differs" in text
    assert "| streaming, checkpointed | 8 | runs | 1.00 | 2.00 | 3.00 | 2.00 | 8192 |" in text
    assert "| tokens | WRONG, 200 s: ended |" in text
    assert "## tokens" not in text
