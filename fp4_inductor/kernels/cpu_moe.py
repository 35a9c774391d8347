"""Let the C++ kernel answer the op's calls on a CPU: a mixture-of-experts block on weights in row blocks.

``kernels/cpu/op.cpp`` is what the dispatcher calls from then on, and says what it takes; no call needs Python.
"""

from __future__ import annotations

import ctypes

import torch

from .cpu_build import BuildError, Library, choose_isa, load_libraries


def install_kernel() -> None:
    """Build what this processor needs, and register it; where it is, take the instruction sets that are now wanted.

    Raises:
        BuildError: there is no compiler, it fails, or torch does not take what it made.
        InvalidOptionError: the environment names an instruction set that there is none of.
    """
    isas = [choose_isa(dtype) for dtype in (torch.bfloat16, torch.float32)]
    op, *kernels = load_libraries(Library("op", "portable"), *(Library("moe", isa) for isa in isas))
    for kernel in kernels:
        kernel.fp4_kernel.restype = ctypes.c_void_p
    op.fp4_install.argtypes = [ctypes.c_void_p] * len(kernels)
    if op.fp4_install(*(kernel.fp4_kernel() for kernel in kernels)):
        got = "an error, which torch has printed"
        raise BuildError("registering the CPU kernel", needed="torch to take it", got=got, now="please report this")
