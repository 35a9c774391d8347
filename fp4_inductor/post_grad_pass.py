"""The pass door: Inductor's ``post_grad_custom_pre_pass``, for people who build their own stack.

This module needs Inductor's base class, so it is imported on first use only.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from .device import DeviceInfo
from .lowering_pass import lower
from .options import Options
from .report import dump_report


class Fp4MoEPass(CustomGraphPass):
    """Rewrites FP4 MoE blocks of inference graphs; weight re-layout stays in the graph, in plain ATen.

    Use it as ``torch._inductor.config.post_grad_custom_pre_pass = Fp4MoEPass()``. The re-layout runs in
    every call here: values must not be baked into artefacts that Inductor caches. The ``fp4moe``
    backend folds it.
    """

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()

    def __call__(self, graph: fx.Graph) -> None:
        if _needs_gradients(graph):
            return
        lowering = lower(graph, self.options)
        graph.lint()
        dump_report(lowering.report)

    def uuid(self) -> Any:
        """Everything that the rewrite depends on: our sources, the options, device, kernel libraries."""
        return ("Fp4MoEPass", *cache_key(self.options))


class CacheKeyPass(CustomGraphPass):
    """Changes no graph: puts our key, and that of the user's own pass, into Inductor's cache keys."""

    def __init__(self, options: Options, inner: Any = None) -> None:
        self.options = options
        self.inner = inner if inner is None or isinstance(inner, list | tuple) else (inner,)

    def __call__(self, graph: fx.Graph) -> None:
        for inner in self.inner or ():
            inner(graph)

    def uuid(self) -> Any:
        """None, which bypasses the caches, where one of the user's passes has no uuid."""
        inner = tuple(p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.inner or ())
        return None if None in inner else ("fp4moe", *cache_key(self.options), *inner)


def cache_key(options: Options) -> tuple[Any, ...]:
    """A picklable value that differs wherever a rewrite may differ."""
    index = torch.cuda.current_device() if torch.cuda.is_available() else None
    device = DeviceInfo.current(torch.device("cpu" if index is None else f"cuda:{index}"))
    return _source_hash(), astuple(options), str(device), device.libraries


@functools.cache
def _source_hash() -> str:
    from . import patterns

    digest = hashlib.sha256()
    roots = [Path(__file__).parent, *map(Path, patterns.__path__)]
    for file in sorted({file for root in roots for file in root.rglob("*") if file.suffix in (".py", ".cpp")}):
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _needs_gradients(graph: fx.Graph) -> bool:
    """A joint or forward-for-backward graph, by the names AOTAutograd gives its inputs."""
    return any(str(node.target).startswith(("primals_", "tangents_")) for node in graph.find_nodes(op="placeholder"))
