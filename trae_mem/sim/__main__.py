"""``python -m trae_mem.sim [options] SCRIPT ARGS...`` runs a program on a simulated GPU.

``-m MODULE ARGS...`` runs a module, as Python's own option does. The exit code is the program's.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from trae_mem.errors import TraeMemError
from trae_mem.sim.activation import activate
from trae_mem.sim.settings import MODES


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trae_mem.sim",
        description="Run a Python program on a simulated GPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--gpu", default="A10", help="the card's name (A10)")
    parser.add_argument("--devices", type=int, default=1, help="how many of them (1)")
    parser.add_argument("--memory", help="for example 24GiB (the card's)")
    parser.add_argument("--link", help="for example 25GB/s, 0 for no limit (the card's)")
    parser.add_argument("--mode", choices=MODES, default=MODES[0], help="dry: no kernel runs")
    parser.add_argument("--seed", type=int, default=0, help="of the random delays (0)")
    parser.add_argument(
        "--delay-us", type=int, default=0, help="longest random delay of copies and kernels (0)"
    )
    parser.add_argument("--poison", action="store_true", help="freed memory is full of NaN")
    parser.add_argument("--pace", action="store_true", help="copies and kernels take their time")
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module's name")
    parser.add_argument("program", metavar="PROGRAM")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code of what went wrong before it began."""
    options = vars(_parser().parse_args(arguments))
    program, module = options.pop("program"), options.pop("module")
    own = options.pop("arguments")
    try:
        activate(**options)
    except TraeMemError as error:
        print(f"trae_mem: {error}", file=sys.stderr)
        return 2
    sys.argv[:] = [program, *own]
    if module:
        # `python -m` puts the current folder first; it stands there already, for this module.
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program).resolve().parent)
        runpy.run_path(program, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
