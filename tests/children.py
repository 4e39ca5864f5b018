"""Code that is run in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


def run_python(code: str, *args: object, timeout: int = 300, **environment: str) -> str:
    """What the code prints; fails with what it wrote to its error output."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(_ROOT), str(_ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, f"exit code {result.returncode}:\n{result.stderr}"
    return result.stdout
