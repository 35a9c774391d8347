"""Instruction sets of the CPU kernel, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fp4_inductor.kernels.cpu_build import ISA_VARIABLE, processor_isas
from fp4_inductor.kernels.cpu_moe import install_kernel


@contextmanager
def forced_isa(isa: str) -> Iterator[None]:
    """Calls of the op run on ``isa``."""
    if isa not in processor_isas():
        pytest.skip(f"this processor has no {isa}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ISA_VARIABLE, isa)
        install_kernel()
        yield
    install_kernel()
