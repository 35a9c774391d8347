"""Compile the kernels of a lowered graph while Inductor compiles the rest of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import torch
from torch import fx

from .backends import BACKENDS
from .backends.base import AheadBackend
from .emit import fused_calls

logger = logging.getLogger(__name__)

_Call: TypeAlias = "tuple[AheadBackend, str, tuple[Any, ...]]"


class CompilingAhead:
    """Compilation, in another thread, of what the calls of fused ops in ``graph`` launch on a GPU.

    Sizes that are not known are taken to be what they were when the graph was traced. An error is left to the call,
    which will meet it again.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._work: list[Future[None]] = []
        pool = ThreadPoolExecutor(1, "fp4_inductor_compile")
        for device, calls in _calls(graph).items():
            self._work.append(pool.submit(_compile, calls, device))
        pool.shutdown(wait=False)

    def wait(self) -> None:
        """Until all is compiled, so that a call does not compile it again."""
        while self._work:
            if (error := self._work.pop().exception()) is not None:
                logger.info("kernels are compiled when they are first called: %s", error)


def _compile(calls: Sequence[_Call], device: torch.device) -> None:
    with torch.cuda.device(device):
        for backend, op, values in calls:  # stand-ins are made here, where no fake mode is active
            backend.compile_call(op, tuple(map(_stand_in, values)))


def _calls(graph: fx.Graph) -> dict[torch.device, list[_Call]]:
    """One call of each kind, with its fake arguments, by the device that it runs on."""
    backends = {op: backend for backend in BACKENDS if isinstance(backend, AheadBackend) for op in backend.ops}
    found: dict[torch.device, list[_Call]] = {}
    seen = set()
    for node, op in fused_calls(graph):
        values = fx.map_arg(node.args, lambda arg: arg.meta["val"])
        device = node.meta["val"].device
        if op not in backends or device.type != "cuda" or not all(map(_is_known, values)):
            continue
        kind = (op, device, *map(_kind, values))
        if kind not in seen:
            seen.add(kind)
            found.setdefault(device, []).append((backends[op], op, values))
    return found


def _is_known(value: object) -> bool:
    return not isinstance(value, torch.Tensor) or all(_hint(size) is not None for size in value.shape)


def _hint(size: int | torch.SymInt) -> int | None:
    """The size that was seen, without a guard on it."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _kind(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, tuple(map(_hint, value.shape))
    return type(value), value


def _stand_in(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    if value.device.type == "cpu":  # a scalar, whose value compiles nothing else
        return torch.ones((), dtype=value.dtype)
    sizes = [size for size in map(_hint, value.shape) if size is not None]
    return torch.empty(sizes, dtype=value.dtype, device="meta")
