"""Where packed 4-bit weights enter a graph, and which GEMMs they reach."""

from __future__ import annotations

import torch
from torch import fx

from ..matching import WRITTEN
from .graph_tools import CAST, aten, is_call, readers, tensor

_GEMMS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::_grouped_mm",
        "aten::_scaled_mm",
        "aten::_scaled_grouped_mm",
        "transformers::grouped_mm_fallback",
    }
)
_NIBBLE_OPS = frozenset(
    {
        "aten::__rshift__",
        "aten::bitwise_right_shift",
        "aten::__and__",
        "aten::bitwise_and",
        "aten::div",
        "aten::floor_divide",
        "aten::remainder",
        "aten::fmod",
    }
)
_LOOK_UPS = frozenset({"aten::index", "aten::index_select", "aten::embedding", "aten::gather", "aten::take"})
_TABLE_BYTES = 512
"""Bytes in one row that are no more than this are a table themselves."""
_NIBBLE_CONSTANTS = (4, 15, 16, 240)
_PICKING = (aten.slice.Tensor, aten.select.int, CAST)


def is_gemm(node: fx.Node) -> bool:
    return _op_name(node) in _GEMMS


def packed_roots(graph: fx.Graph) -> list[fx.Node]:
    """The byte tensors of a graph whose nibbles are taken apart: FP4 codes, or something like them."""
    return [node for node in graph.nodes if node.op in ("placeholder", "get_attr") and _is_packed(node)]


def _is_packed(node: fx.Node) -> bool:
    val = tensor(node)
    if val is None or not _is_bytes(node) or (val.dim() < 2 and not _is_long(val.numel())):
        return False
    pending, seen = [node], set()
    while pending:
        shown = pending.pop()
        for reader in (reader for reader, _ in readers(shown) if WRITTEN not in reader.meta):
            if _takes_nibbles(reader):
                return True
            if reader not in seen and (is_call(reader, *_PICKING) or _is_bytes(reader)):
                seen.add(reader)
                pending.append(reader)
    return False


def _is_long(count: int | torch.SymInt) -> bool:
    return isinstance(count, int) and count > _TABLE_BYTES


def _is_bytes(node: fx.Node) -> bool:
    val = tensor(node)
    return val is not None and str(val.dtype) in _BYTES


_BYTES = ("torch.uint8", "torch.int8", "torch.float4_e2m1fn_x2")


def _takes_nibbles(node: fx.Node) -> bool:
    name = _op_name(node)
    if name in _NIBBLE_OPS:
        return any(arg in _NIBBLE_CONSTANTS for arg in node.args[1:] if isinstance(arg, int))
    if name in _LOOK_UPS:  # in a table of all bytes, of one value or two
        table = tensor(node.args[0])
        return table is not None and table.shape[:1] == (256,) and table.numel() in (256, 512)
    return bool(name) and not name.startswith(("aten::", "prims::", "fp4_inductor::"))


def _op_name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return str(schema.name) if node.op == "call_function" and schema is not None else ""


def packed_gemms(graph: fx.Graph, roots: list[fx.Node]) -> dict[fx.Node, frozenset[fx.Node]]:
    """Every GEMM that reads one of ``roots`` without another GEMM between, and which it reads."""
    carried: dict[fx.Node, frozenset[fx.Node]] = {root: frozenset({root}) for root in roots}
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        reads = frozenset().union(*(carried.get(arg, frozenset()) for arg in node.all_input_nodes))
        if not reads:
            continue
        if is_gemm(node):
            found[node] = reads
        else:
            carried[node] = reads
    return found
