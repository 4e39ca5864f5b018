"""The process that runs the marked tests of a module, seen from both of its ends.

Reports go through a pipe, one JSON object a line: pytest's own serialised form, and a line when a
test begins, so that a crash can be laid at its door.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Generator, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from trae_mem.sim import control
from trae_mem.sim.settings import Settings

__all__ = ["Child", "ChildReporter"]

_TAIL = 8000  # characters of a crashed child's output that are shown

# Options of the parent that change what a child reports.
_FORWARDED = {"tbstyle": "--tb", "capture": "--capture"}
_FLAGS = {"showlocals": "--showlocals", "runxfail": "--runxfail"}


class Child:
    """The parent's end. Its tests' reports may be asked for in any order."""

    def __init__(
        self, config: pytest.Config, settings: Settings, items: list[pytest.Item], pipe: str
    ) -> None:
        self._config = config
        self._waiting: dict[str, list[pytest.TestReport]] = {item.nodeid: [] for item in items}
        self._finished: set[str] = set()
        self._running: str | None = None  # the test that has begun and not finished
        self._culprit: str | None = None  # the test that was running when the child died
        self._arguments = tempfile.NamedTemporaryFile("w", suffix=".args", encoding="utf-8")  # noqa: SIM115
        self._arguments.write("\n".join(self._waiting))
        self._arguments.flush()
        # With -s the tests' output is to be seen as it comes.
        shown = config.option.capture == "no"
        self._output = None if shown else tempfile.TemporaryFile()  # noqa: SIM115
        read, write = os.pipe()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "trae_mem.sim", *_sim_options(settings)),
                *("-m", "pytest", *_options(config), f"@{self._arguments.name}"),
            ],
            cwd=config.rootpath,
            env={**os.environ, pipe: str(write), "PYTHONPATH": _search_path(config)},
            pass_fds=[write],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT if self._output else None,
        )
        os.close(write)
        self._lines: Iterator[str] = open(read, encoding="utf-8")  # noqa: SIM115

    def reports_of(self, item: pytest.Item) -> Generator[pytest.TestReport, None, str | None]:
        """The test's reports as they come; returns what went wrong if the child ended before."""
        nodeid = item.nodeid
        while True:
            while self._waiting.get(nodeid):
                yield self._waiting[nodeid].pop(0)
            if nodeid in self._finished:
                return None
            line = next(self._lines, None)
            if line is None:
                return self._explain_end(nodeid)
            self._take(json.loads(line))

    def _take(self, message: dict[str, Any]) -> None:
        hook = self._config.hook
        if message["kind"] == "begin":
            self._running = message["nodeid"]
        elif message["kind"] == "end":
            self._finished.add(message["nodeid"])
            self._running = None
        elif message["kind"] == "report":
            report = hook.pytest_report_from_serializable(config=self._config, data=message["data"])
            if isinstance(report.longrepr, list):  # JSON has no tuples
                report.longrepr = tuple(report.longrepr)
            self._waiting.setdefault(report.nodeid, []).append(report)
        elif message["kind"] == "warning":
            _replay_warning(self._config, message)

    def _explain_end(self, nodeid: str) -> str:
        status = self._process.wait()
        if self._running is not None:
            self._culprit, self._running = self._running, None
        died = f"died of signal {-status}" if status < 0 else f"ended with exit code {status}"
        subject = f"the process with the simulated GPU {died}"
        if self._culprit is not None and self._culprit != nodeid:
            return f"{subject} while it ran {self._culprit}, so that this test did not run."
        when = "before it ran this test" if self._culprit is None else "while it ran this test"
        return f"{subject} {when}.{self._end_of_output()}"

    def _end_of_output(self) -> str:
        if self._output is None:
            return ""
        self._output.seek(0)
        return " Its output:\n" + self._output.read().decode(errors="replace")[-_TAIL:]

    def close(self) -> None:
        """Waits for the child; ends it if it still runs tests."""
        if self._finished >= self._waiting.keys():
            for _ in self._lines:
                pass  # it may still write what nobody reads
        else:
            self._process.kill()
        self._process.wait()
        self._arguments.close()
        if self._output is not None:
            self._output.close()


def _options(config: pytest.Config) -> list[str]:
    found = ["-q", "-p", "no:cacheprovider", "-p", "trae_mem.sim.pytest_plugin"]
    found.append(f"--rootdir={config.rootpath}")
    if config.inipath is not None:
        found += ["-c", str(config.inipath)]
    found += [f"{flag}={config.getoption(name)}" for name, flag in _FORWARDED.items()]
    found += [flag for name, flag in _FLAGS.items() if config.getoption(name)]
    found += [f"-W{rule}" for rule in config.getoption("pythonwarnings") or []]
    found += [f"--override-ini={value}" for value in config.getoption("override_ini") or []]
    return found


def _sim_options(settings: Settings) -> list[str]:
    found = []
    for one in fields(settings):
        value = getattr(settings, one.name)
        flag = "--" + one.name.replace("_", "-")
        if value is True:
            found.append(flag)
        elif value is not False and value is not None:
            found.append(f"{flag}={value}")
    return found


def _search_path(config: pytest.Config) -> str:
    """The child is started in the root folder; modules that this process finds must be found."""
    here = str(Path(__file__).resolve().parents[2])
    known = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(path for path in (here, known) if path)


def _replay_warning(config: pytest.Config, message: dict[str, Any]) -> None:
    category = type(message["category"], (Warning,), {"__module__": message["module"]})
    warning = warnings.WarningMessage(
        message=category(message["text"]),
        category=category,
        filename=message["filename"],
        lineno=message["lineno"],
    )
    location = message["location"]
    config.hook.pytest_warning_recorded.call_historic(
        kwargs={
            "warning_message": warning,
            "when": message["when"],
            "nodeid": message["nodeid"],
            "location": tuple(location) if location else None,
        }
    )


class ChildReporter:
    """The child's end: sends reports, and lets misuse of the simulated GPU fail the test."""

    def __init__(self, config: pytest.Config, pipe: int) -> None:
        self._config = config
        _die_with_parent()
        os.set_inheritable(pipe, False)
        self._pipe = open(pipe, "w", encoding="utf-8", buffering=1)  # noqa: SIM115

    def _send(self, kind: str, **content: object) -> None:
        print(json.dumps({"kind": kind, **content}), file=self._pipe)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Says that a test begins."""
        self._send("begin", nodeid=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Sends a report."""
        hook = self._config.hook
        data = hook.pytest_report_to_serializable(config=self._config, report=report)
        self._send("report", data=data)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Says that a test has ended."""
        self._send("end", nodeid=nodeid)

    def pytest_warning_recorded(
        self, warning_message: Any, when: str, nodeid: str, location: Any
    ) -> None:
        """Sends a warning."""
        self._send(
            "warning",
            category=warning_message.category.__name__,
            module=warning_message.category.__module__,
            text=str(warning_message.message),
            filename=warning_message.filename,
            lineno=warning_message.lineno,
            when=when,
            nodeid=nodeid,
            location=location,
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Generator[None, object, object]:
        """Begins with a healthy device, no misuse, and no error that the test before has left."""
        control.clear_faults()
        control.clear_reports()
        ctypes.CDLL(None).cudaGetLastError()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Fails the test if it misused the simulator, in what it queued too."""
        result = yield
        self._check(item)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        """The same for what fixtures do at their end."""
        result = yield
        self._check(item)
        return result

    def _check(self, item: pytest.Item) -> None:
        _wait_for_devices()
        found = control.reports()
        control.clear_reports()
        expected = any(mark.kwargs.get("reports") == "ignore" for mark in item.iter_markers("sim"))
        if found and not expected:
            texts = "\n".join(map(str, found))
            pytest.fail(f"the simulated GPU noticed {len(found)} misuses:\n{texts}", pytrace=False)


def _die_with_parent() -> None:
    """A test that hangs must not outlive the pytest that is stopped for it."""
    set_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def _wait_for_devices() -> None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    for device in range(torch.cuda.device_count()):
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            return  # it has failed for good; the test has seen it, or will see the report
