"""Where Dynamo breaks a loop over experts into pieces that no backend sees whole, and the cure."""

from __future__ import annotations

import contextlib
import dis
import linecache
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

import torch
from torch import fx, nn

from .matching import NearMiss, SourceLocation
from .modules import WeightCarrier, transposed_experts
from .patterns.graph_tools import aten, is_call, same, tensor
from .patterns.packed import is_gemm, packed_gemms, packed_roots
from .report import BrokenExperts, LoweringReport

_NOT_THE_USERS = (
    *(str(Path(file).parent) + os.sep for file in (torch.__file__, __file__)),
    contextlib.__file__,
    "<frozen",
    "<eval_with_key",
)


def report_broken_experts(graph: fx.Graph, report: LoweringReport) -> BrokenExperts | None:
    """Say in ``report`` that ``graph`` is a piece of a loop over experts, if it is.

    To be called while Dynamo compiles: the user's line is the one that runs now.
    """
    if not report.near_misses and not report.linear_layers:
        return None
    frames = list(_user_frames())
    unrolls = _broke_over_sizes()
    if not frames or not (_lets_weights_out(graph) or (unrolls and _is_one_expert(graph) and _loops(frames[0]))):
        return None
    broken = _running_now(frames, unrolls)
    report.broken_experts.append(broken)
    one_of_many = "a linear layer of one expert, whose others are in other graphs"
    report.near_misses += [
        NearMiss(layer.anchor, "none", one_of_many, 0.0, layer.packed_bytes, layer.where)
        for layer in report.linear_layers
    ]
    report.linear_layers.clear()
    report.near_misses[:] = [
        miss if miss.where.file else replace(miss, where=broken.where) for miss in report.near_misses
    ]
    return broken


def _broke_over_sizes() -> bool:
    """Whether Dynamo has met an operation whose result's size depends on values, and was not told to trace it."""
    from torch._dynamo.utils import counters

    return any("capture_dynamic_output_shape_ops" in reason for reason in counters["graph_break"])


def _lets_weights_out(graph: fx.Graph) -> bool:
    """Whether the graph returns the dequantised weights of all experts, or of one, instead of multiplying by them."""
    for root in packed_roots(graph):
        codes = tensor(root)
        assert codes is not None
        sizes = (2 * codes.numel(), 2 * codes.numel() // codes.shape[0])
        pending, seen = [root], {root}
        while pending:
            node = pending.pop()
            val = tensor(node)
            is_weight = val is not None and val.is_floating_point() and any(same(val.numel(), size) for size in sizes)
            if is_weight and any(reader.op == "output" for reader in node.users):
                return True
            new = [reader for reader in node.users if reader not in seen and not is_gemm(reader)]
            seen.update(new)
            pending += new
    return False


def _is_one_expert(graph: fx.Graph) -> bool:
    """Whether the graph multiplies by one matrix at a time, as an expert does on its own."""
    gemms = packed_gemms(graph, packed_roots(graph))
    return bool(gemms) and all(is_call(gemm, aten.mm.default, aten.addmm.default) for gemm in gemms)


def _loops(frame: FrameType) -> bool:
    return any(instruction.opname == "FOR_ITER" for instruction in dis.get_instructions(frame.f_code))


def _running_now(frames: Sequence[FrameType], unrolls: bool) -> BrokenExperts:
    """What runs in ``frames``, the innermost first."""
    modules = [frame.f_locals["self"] for frame in frames if isinstance(frame.f_locals.get("self"), nn.Module)]
    file, line = frames[0].f_code.co_filename, frames[0].f_lineno
    where = SourceLocation(file, line, linecache.getline(file, line).strip(), "")
    if not modules:
        return BrokenExperts(where, "", in_transformers=False, unrolls=unrolls)
    owner, model = modules[0], modules[-1]
    path = next((name for name, module in model.named_modules() if module is owner), "")
    kind = owner._unpacked_class if isinstance(owner, WeightCarrier) else type(owner)
    known = transposed_experts(owner) is not None
    return BrokenExperts(replace(where, module=path), kind.__name__, in_transformers=known, unrolls=unrolls)


def _user_frames() -> Iterator[FrameType]:
    """The frames of the user's code that wait for this call, the innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            yield frame
        frame = frame.f_back
