"""The pytest plugin: marked tests run elsewhere, and everything looks as if they had run here."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from xml.etree import ElementTree

import pytest

from trae_mem.sim import libraries

MODULE = """
import os, pytest, torch, warnings

def test_unmarked():
    assert not torch.cuda.is_available()

@pytest.fixture(scope="module")
def process():
    print("made for", os.getpid())
    yield os.getpid()

def test_unmarked_with_fixture(process):
    assert process == os.getpid()

@pytest.mark.sim
def test_marked(process, record_property):
    print("said so")
    record_property("sum", torch.ones(3, device="cuda").sum().item())
    assert process == os.getpid()

@pytest.mark.sim
@pytest.mark.parametrize("word", ["a", "b c"])
def test_parameters(word):
    assert len(word) < 2, f"too long: {word}"

@pytest.mark.sim
def test_skips():
    pytest.skip("no reason")

@pytest.mark.sim
@pytest.mark.xfail(reason="known")
def test_expected():
    assert False

@pytest.mark.sim
def test_warns():
    warnings.warn("careful now")

@pytest.mark.sim
def test_misuse():
    import ctypes
    ctypes.CDLL(None).cudaFreeHost(ctypes.c_void_p(64))

@pytest.mark.sim(reports="ignore")
def test_misuse_on_purpose():
    test_misuse()

@pytest.mark.sim(gpu="L4")
class TestOthers:
    def test_card(self):
        assert torch.cuda.get_device_name() == "L4"

    @pytest.mark.sim(devices=2)
    def test_nearest_mark_adds(self):
        assert (torch.cuda.get_device_name(), torch.cuda.device_count()) == ("L4", 2)

    @pytest.mark.sim(devices=2)
    def test_crash(self):
        os.abort()

    @pytest.mark.sim(devices=2)
    def test_behind_the_crash(self):
        pass

def test_unmarked_at_the_end(process):
    assert process == os.getpid()
"""


def run(folder, *arguments, **environment):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "trae_mem.sim.pytest_plugin"),
            *("-p", "no:cacheprovider", "--junitxml=found.xml", *arguments),
        ],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    tree = ElementTree.parse(folder / "found.xml")
    return done, {case.get("name"): case for case in tree.iter("testcase")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("marked")
    (made / "test_marked.py").write_text(textwrap.dedent(MODULE), encoding="utf-8")
    (made / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n", encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def session(folder):
    try:
        libraries.build("numeric")
    except libraries.UnavailableError as error:
        pytest.skip(str(error))
    return run(folder)


def outcome(case):
    kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
    return kinds[0] if kinds else "passed"


def test_each_test_has_its_outcome(session):
    done, cases = session
    assert {name: outcome(case) for name, case in cases.items()} == {
        "test_unmarked": "passed",
        "test_unmarked_with_fixture": "passed",
        "test_marked": "passed",
        "test_parameters[a]": "passed",
        "test_parameters[b c]": "failure",
        "test_skips": "skipped",
        "test_expected": "skipped",
        "test_warns": "passed",
        "test_misuse": "failure",
        "test_misuse_on_purpose": "passed",
        "test_card": "passed",
        "test_nearest_mark_adds": "passed",
        "test_crash": "failure",
        "test_behind_the_crash": "failure",
        "test_unmarked_at_the_end": "passed",
    }
    assert "4 failed, 9 passed, 1 skipped, 1 xfailed, 1 warning" in done.stdout
    assert done.returncode == 1


def test_what_a_test_says_is_shown(session):
    done, cases = session
    assert "too long: b c" in cases["test_parameters[b c]"].find("failure").text
    assert cases["test_marked"].find("properties/property").get("value") == "3.0"
    assert "UserWarning: careful now" in done.stdout


def test_misuse_fails_a_test(session):
    _, cases = session
    assert "invalid handle" in cases["test_misuse"].find("failure").text


def test_a_crash_is_laid_at_the_door_of_its_test(session):
    _, cases = session
    crash = cases["test_crash"].find("failure").text
    assert "died of signal 6 while it ran this test" in crash
    assert "Fatal Python error: Aborted" in crash
    assert "test_crash, so that this test did not run" in (
        cases["test_behind_the_crash"].find("failure").text
    )


def test_the_first_failure_ends_the_run_if_asked_to(session, folder):
    done, cases = run(folder, "-x", "-k", "parameters or warns")
    assert {name: outcome(case) for name, case in cases.items()} == {
        "test_parameters[a]": "passed",
        "test_parameters[b c]": "failure",
    }
    assert "1 failed, 1 passed" in done.stdout


def test_without_a_compiler_the_tests_are_skipped_with_the_reason(folder):
    done, cases = run(folder, "-rs", "-k", "test_warns", CXX="no-such-compiler")
    assert [outcome(case) for case in cases.values()] == ["skipped"]
    assert "no-such-compiler not found" in done.stdout
    assert done.returncode == 0


def test_an_argument_that_there_is_not_is_an_error(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.mark.sim(gpu='A11')\ndef test_it(): pass\n", encoding="utf-8"
    )
    done, _ = run(tmp_path)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "unknown card" in done.stdout + done.stderr
