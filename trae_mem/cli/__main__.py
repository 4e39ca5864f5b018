"""`python -m trae_mem.cli` is `trae-mem`."""

from trae_mem.cli import main

main()
