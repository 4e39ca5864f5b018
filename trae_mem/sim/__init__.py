"""A simulated GPU: the real CUDA build of torch, and the real CUDA code of trae_mem, without a GPU.

    from trae_mem import sim
    sim.activate(gpu="A10")        # before torch is imported
    import torch
    torch.ones(3, device="cuda")

or, for a program as it is: ``python -m trae_mem.sim --gpu A10 SCRIPT ARGS...``. A CUDA runtime and
driver over host memory take the place of NVIDIA's. In *numeric* mode kernels run on the CPU, in
the order of their streams; in *dry* mode they do nothing and memory is only counted, so that
models of any size run in seconds. :mod:`trae_mem.sim.control` looks into it: misuse that it
noticed, calls, faults on demand. What it does not model stands in ``csrc/simgpu/README.md``.

It is built from the sources when it is first used: a checkout, a C++20 compiler and CUDA's headers.
Importing this package imports no torch.
"""

from __future__ import annotations

from trae_mem.sim.activation import activate, active
from trae_mem.sim.settings import Settings

__all__ = ["Settings", "activate", "active"]
