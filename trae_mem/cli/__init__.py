"""The command line, one file a verb. `main` is the entry point of `trae-mem` and `trae`."""

from __future__ import annotations

import sys

# What `pip install "trae-mem[train]"` brings: a missing one is a matter of set-up, not a bug.
_EXTRA = {
    "accelerate",
    "gguf",
    "huggingface_hub",
    "matplotlib",
    "peft",
    "psutil",
    "pydantic",
    "rich",
    "safetensors",
    "transformers",
    "typer",
    "yaml",
}


def main() -> None:
    """Runs the command line on `sys.argv` and exits with its code.

    0: done; 1: a check or a run failed; 2: bad configuration or usage; 130: Ctrl-C.
    """
    try:
        from trae_mem.cli.main import run

        code = run(sys.argv[1:])
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        print(
            f"trae-mem: the Python package {package!r} is missing, which the command line needs; "
            'install it with: pip install "trae-mem[train]"',
            file=sys.stderr,
        )
        code = 2
    sys.exit(code)
