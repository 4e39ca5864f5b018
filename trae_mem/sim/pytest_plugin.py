"""A pytest plugin: tests marked ``sim`` run in a process that has a simulated GPU.

    pytest_plugins = ["trae_mem.sim.pytest_plugin"]        # in conftest.py

    @pytest.mark.sim(gpu="A10", devices=2)      # the arguments of trae_mem.sim.activate
    def test_something(): ...

The mark may stand at a test, a class or, as ``pytestmark``, a module; the nearest one's arguments
win. One more argument, ``reports="ignore"``, lets a test misuse the simulator: otherwise misuse
that it notices fails the test.

A process can have one simulated GPU and it must come before torch, so these tests run in child
processes: one for each module and each combination of arguments, started at the first such test.
A child is pytest, too; its reports are replayed here, so that counts, failures, ``-x`` and junit's
XML are as if the tests had run here. Where the simulator cannot be built the tests are skipped with
the reason; where it fails to compile they fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from trae_mem.errors import NativeLibraryError
from trae_mem.sim import libraries
from trae_mem.sim._pytest_child import Child, ChildReporter
from trae_mem.sim.settings import Settings

_PIPE = "TRAE_MEM_SIM_PYTEST_PIPE"  # a child: the file descriptor that its reports go to


def pytest_configure(config: pytest.Config) -> None:
    """Registers the mark, and this process's part: parent or child."""
    config.addinivalue_line(
        "markers",
        "sim(gpu='A10', devices=1, ..., reports='fail'): run on a simulated GPU, in a process of "
        "its own; the arguments of trae_mem.sim.activate",
    )
    pipe = os.environ.pop(_PIPE, None)  # not for pytest runs that tests start
    if pipe is None:
        config.pluginmanager.register(_Parent(), "trae-mem-sim-parent")
    else:
        config.pluginmanager.register(ChildReporter(config, int(pipe)), "trae-mem-sim-child")


class _Parent:
    """Hands marked tests to children and replays what they report."""

    def __init__(self) -> None:
        self._children: dict[tuple[str, Settings], Child] = {}
        self._obstacles: dict[str, tuple[str, str] | None] = {}  # by mode: outcome and reason

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        """Replays the reports of a marked test instead of running it."""
        settings = settings_of(item)
        if settings is None:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports(item, settings):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        # What the test before this one has left for the module's others goes with the last one.
        state: Any = item.session
        state._setupstate.teardown_exact(nextitem)
        return True

    def _reports(self, item: pytest.Item, settings: Settings) -> Iterator[pytest.TestReport]:
        obstacle = self._find_obstacle(settings.mode)
        if obstacle is not None:
            outcome, reason = obstacle
            yield _made_report(item, outcome, reason)
            return
        key = _module_of(item), settings
        if key not in self._children:
            items = [one for one in item.session.items if _belongs(one, key)]
            self._children[key] = Child(item.config, settings, items, _PIPE)
        failure = yield from self._children[key].reports_of(item)
        if failure is not None:
            yield _made_report(item, "failed", failure)

    def _find_obstacle(self, mode: str) -> tuple[str, str] | None:
        if mode not in self._obstacles:
            self._obstacles[mode] = None
            try:
                libraries.build(mode)
            except libraries.UnavailableError as error:
                self._obstacles[mode] = "skipped", f"Skipped: {error}"
            except NativeLibraryError as error:
                self._obstacles[mode] = "failed", str(error)
        return self._obstacles[mode]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Ends children whose tests were not all waited for, after -x for example."""
        for child in self._children.values():
            child.close()


def settings_of(item: pytest.Item) -> Settings | None:
    """What the marks of a test ask for; None if it has none.

    Raises:
        pytest.UsageError: an argument that ``activate`` does not have.
    """
    arguments = _arguments_of(item)
    if arguments is None:
        return None
    arguments.pop("reports", None)
    try:
        settings = Settings(**arguments)
        settings.text()
    except (TypeError, ValueError) as error:
        raise pytest.UsageError(f"{item.nodeid}: the mark sim: {error}") from error
    return settings


def _arguments_of(item: pytest.Item) -> dict[str, Any] | None:
    marks = list(item.iter_markers("sim"))  # the nearest one first
    merged: dict[str, Any] = {}
    for mark in reversed(marks):
        merged |= mark.kwargs
    return merged if marks else None


def _module_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _belongs(item: pytest.Item, key: tuple[str, Settings]) -> bool:
    return _module_of(item) == key[0] and settings_of(item) == key[1]


def _made_report(item: pytest.Item, outcome: Any, text: str) -> pytest.TestReport:
    """A report that no child has sent."""
    file, line, _ = item.location
    explanation: Any = (file, line or 0, text) if outcome == "skipped" else text
    return pytest.TestReport(
        item.nodeid,
        item.location,
        dict.fromkeys(item.keywords, 1),
        outcome,
        explanation,
        "setup" if outcome == "skipped" else "call",
    )
