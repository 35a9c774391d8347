"""Launch a kernel, or only compile what the launch would run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import triton

_compiles_only: ContextVar[bool] = ContextVar("compiles_only", default=False)
_THREADS = 4


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
    """``kernel[grid]``; inside ``compiling_only`` it compiles the kernel and launches nothing."""
    return partial(kernel.warmup, grid=grid) if _compiles_only.get() else kernel[grid]


@contextmanager
def compiling_only() -> Iterator[None]:
    """What this thread would launch is compiled for the current device instead, side by side.

    Arguments are tensors on the meta device, which Triton takes for aligned. On leaving, all is compiled.
    """
    before = _compiles_only.set(True)
    try:
        with ThreadPoolExecutor(_THREADS) as pool, triton.AsyncCompileMode(pool):
            yield
    finally:
        _compiles_only.reset(before)


def device_index(device: torch.device) -> int | None:
    """Which CUDA device runs what is launched on tensors of ``device``."""
    return torch.cuda.current_device() if device.type == "meta" else device.index
