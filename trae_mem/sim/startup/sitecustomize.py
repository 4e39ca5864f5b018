"""Python imports this at its start when the folder is in PYTHONPATH: see ``sim.activate``.

It loads the simulated GPU of the process that started this one, and then whatever
``sitecustomize`` it hides.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _gets_its_own() -> bool:
    """Whether this is ``python -m trae_mem.sim``, which replaces what it would inherit."""
    arguments = sys.orig_argv[1:]
    if "-m" not in arguments:
        return False
    first = arguments.index("-m")
    before, module = arguments[:first], arguments[first + 1 : first + 2]
    return module == ["trae_mem.sim"] and all(one.startswith("-") for one in before)


def _load_simulator() -> None:
    root = str(_HERE.parents[2])
    sys.path.insert(0, root)
    try:
        from trae_mem.sim import libraries
    finally:
        sys.path.remove(root)
    inherited = libraries.find_inherited()
    if inherited is not None:
        inherited.load()


def _run_hidden() -> None:
    elsewhere = [path for path in sys.path if Path(path or ".").resolve() != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if not _gets_its_own():
    _load_simulator()
_run_hidden()
