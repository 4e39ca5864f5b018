"""The compiled part may be missing or unfit: importing works, the first call explains."""

from __future__ import annotations

import pytest
from children import run_python

import trae_mem
from trae_mem.native import load_native

# A finder that stands in front of all others and has another module, or none, for the native one.
_BLOCKED = """
import importlib.machinery, importlib.util, sys, types

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "trae_mem._native":
            {action}

sys.meta_path.insert(0, Finder)
import trae_mem
assert "torch" not in sys.modules, "importing trae_mem imports torch"
assert trae_mem.__version__
for call in (
    lambda: trae_mem.HostDevice(),
    lambda: trae_mem.enable(__import__("torch").nn.Module()),
):
    try:
        call()
    except trae_mem.NativeLibraryError as error:
        assert isinstance(error, ImportError)
        print(error)
"""
_MISSING = 'raise ImportError("no such file")'
_BROKEN = 'raise ImportError("undefined symbol: _ZN3foo")'
_OLD = """
            class Loader:
                def create_module(self, spec):
                    module = types.ModuleType(name)
                    module.INTERFACE = 0
                    return module
                def exec_module(self, module):
                    pass
            return importlib.util.spec_from_loader(name, Loader())"""


@pytest.mark.parametrize(
    ("action", "reason"),
    [(_MISSING, "no such file"), (_BROKEN, "undefined symbol"), (_OLD, "interface 0")],
    ids=["missing", "broken", "old"],
)
def test_the_first_call_explains_and_names_the_command(action, reason):
    lines = run_python(_BLOCKED.format(action=action)).splitlines()
    assert len(lines) == 2
    for line in lines:
        assert "compiled part" in line
        assert reason in line
        assert "pip install --no-build-isolation -e ." in line


def test_the_python_part_and_the_compiled_part_fit():
    native = load_native()
    assert native.INTERFACE == trae_mem.native.INTERFACE
    assert trae_mem.HostDevice is native.HostDevice


def test_names_that_do_not_exist():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        trae_mem.nothing  # noqa: B018
    for name in trae_mem.__all__:
        assert getattr(trae_mem, name) is not None
