"""Runs make targets one after another, each to its end, and sums up what they found.

    python tools/run_stages.py make lint test-native …

A stage that fails does not stop the next ones: one run tells everything. The last line adds up
the tests that GoogleTest and pytest report in `build/test-results/*.xml`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

RESULTS = Path(__file__).resolve().parent.parent / "build" / "test-results"


def outcome(case: ElementTree.Element) -> str:
    """One JUnit test case: "failed", "skipped" or "passed"."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    if case.find("skipped") is not None or case.get("status") == "notrun":
        return "skipped"
    return "passed"


def count() -> dict[str, int]:
    """The outcomes of all the reports."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for report in sorted(RESULTS.glob("*.xml")):
        for case in ElementTree.parse(report).iter("testcase"):
            counts[outcome(case)] += 1
    return counts


def main() -> int:
    make, *stages = sys.argv[1:]
    RESULTS.mkdir(parents=True, exist_ok=True)
    for report in RESULTS.glob("*.xml"):
        report.unlink()
    lines, failed_stages = [], 0
    for stage in stages:
        print(f"== {stage}", flush=True)
        begin = time.monotonic()
        # Open descriptors are passed on: among them is the parent make's job server.
        command = [make, "--no-print-directory", stage]
        status = subprocess.run(command, close_fds=False).returncode
        failed_stages += status != 0
        word = "FAILED" if status else "ok"
        lines.append(f"{stage:<12} {word:<6} {time.monotonic() - begin:6.1f} s")
        print(f"== {lines[-1]}\n", flush=True)
    print("\n".join(lines))
    counts = count()
    # A stage may fail without a failed test: lint, a compile error, a crash, a data race.
    failed = max(counts["failed"], failed_stages)
    print(f"{counts['passed']} passed, {failed} failed, {counts['skipped']} skipped")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
