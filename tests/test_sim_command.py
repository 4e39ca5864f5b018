"""``python -m trae_mem.sim`` and what the processes that a simulated one starts see."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from trae_mem.errors import NativeLibraryError
from trae_mem.sim import libraries


@pytest.fixture(scope="module", autouse=True)
def built():
    try:
        libraries.build("numeric")
    except libraries.UnavailableError as error:
        pytest.skip(str(error))


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.fixture
def script(tmp_path):
    def write(code: str, name: str = "script.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(code), encoding="utf-8")
        return path

    return write


def test_a_script_runs_with_its_arguments_and_gives_its_exit_code(script):
    script("WORD = 'neighbour'", "beside.py")
    program = script(
        """
        import sys, torch, beside
        from trae_mem import sim
        print(sys.argv[1:], beside.WORD, __name__, sim.active())
        print(torch.cuda.get_device_name(1), torch.cuda.mem_get_info(0)[1])
        print((torch.ones(3, device="cuda") * 2).sum().item())
        sys.exit(3)
        """
    )
    options = ["--gpu", "rtx 3090", "--devices=2", "--memory", "1GiB", "--poison"]
    done = run("-m", "trae_mem.sim", *options, program, "--gpu", "x", "-m")
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines() == [
        "['--gpu', 'x', '-m'] neighbour __main__ True",
        "RTX 3090 1073741824",
        "6.0",
    ]
    assert done.stderr == ""


def test_a_module_runs_too():
    done = run("-m", "trae_mem.sim", "-m", "json.tool", "--help")
    assert done.returncode == 0
    assert "json.tool" in done.stdout


def test_python_processes_that_it_starts_see_the_same_gpu(script, tmp_path):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import builtins\nbuiltins.HIDDEN = 'found'\n")
    program = script(
        """
        import multiprocessing, subprocess, sys

        SAY = (
            "import torch; print(torch.cuda.device_count(), torch.cuda.get_device_name(),"
            "(torch.ones(2, device='cuda') + 1).tolist(), HIDDEN, flush=True)"
        )

        def say():
            exec(SAY)

        if __name__ == "__main__":
            subprocess.run([sys.executable, "-c", SAY], check=True)
            child = multiprocessing.get_context("spawn").Process(target=say)
            child.start()
            child.join()
            sys.exit(child.exitcode)
        """
    )
    done = run("-m", "trae_mem.sim", "--gpu=L4", "--devices=2", program, PYTHONPATH=str(hidden))
    assert done.returncode == 0, done.stderr
    # The sitecustomize module that is hidden by the simulator's own has run, too.
    assert done.stdout.splitlines() == ["2 L4 [2.0, 2.0] found"] * 2


def test_such_a_process_may_have_another_gpu(script):
    program = script(
        """
        import subprocess, sys
        command = [sys.executable, "-m", "trae_mem.sim", "--gpu=L40S", sys.argv[1]]
        sys.exit(subprocess.run(command).returncode)
        """
    )
    inner = script("import torch; print(torch.cuda.get_device_name())", "inner.py")
    done = run("-m", "trae_mem.sim", "--gpu=L4", program, inner)
    assert (done.stdout, done.returncode) == ("L40S\n", 0), done.stderr


@pytest.mark.parametrize("first", ["", "import ctypes; ctypes.CDLL(None).cuInit(0); "])
def test_a_process_that_ends_in_the_middle_of_its_work_ends_well(script, first):
    program = script(
        f"""
        {first}import torch
        x = torch.ones(300, 300, device="cuda")
        for _ in range(200):
            x = (x @ x) / 300
        """
    )
    done = run("-m", "trae_mem.sim", "--delay-us=2000", program)
    assert (done.returncode, done.stderr) == (0, "")


def test_activate_by_hand(script):
    program = script(
        """
        import sys
        from trae_mem import sim
        assert "torch" not in sys.modules
        sim.activate("A10", memory="256MiB", seed=3)
        assert sim.active()
        import torch
        print(torch.arange(4, device="cuda").sum().item())
        try:
            sim.activate("L4")
        except Exception as error:
            print(type(error).__name__, error)
        """
    )
    done = run(program)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "6"
    assert "has a simulated GPU already" in second


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--gpu", "A11", "x.py"], "unknown card"), (["--memory", "lots", "x.py"], "not a size")],
)
def test_a_wrong_option_is_explained(arguments, message):
    done = run("-m", "trae_mem.sim", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_missing_is_named(script):
    done = run("-m", "trae_mem.sim", script("print(1)"), CXX="no-such-compiler")
    assert done.returncode == 2
    assert "no-such-compiler not found" in done.stderr
    assert done.stdout == ""


def test_a_library_that_is_missing_is_named(tmp_path):
    with pytest.raises(NativeLibraryError, match=r"libsimgpu\.so is not in"):
        libraries.Libraries(tmp_path, None).load()
