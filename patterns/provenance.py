"""Where the bytes and factors of a weight come from: what only moves them is cut off and replayed as it stands.

Views, transposes, un-swizzling, slices that drop padding, joins of tensors that are stored apart: none of that
has to be understood. It ends at a node through which everything from its inputs passes; recognition starts
there, and the re-layout runs the same operations again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, TypeAlias

import torch
from torch import fx

from ..matching import NoMatch
from .graph_tools import arguments, is_call
from .probing import WIDE_FLOATS, cone, constant_value, dtype_of, shape_hint
from .resizing import op_name

BYTES = tuple(
    dtype
    for name in ("uint8", "int8", "float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn_x2")
    if (dtype := getattr(torch, name, None)) is not None
)
Kind: TypeAlias = Literal["bytes", "floats"]

_TABLE_BYTES = 512
"""Constants of one axis and up to this many bytes are tables, no weights."""

_IN_ORDER = {"view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "clone", "alias", "detach", "expand", "slice"}
"""Keep the elements in order, where they keep their number."""
_MOVING = (_IN_ORDER - {"expand"}) | {
    "permute", "transpose", "t", "select", "unbind", "split", "split_with_sizes", "cat", "stack", "flip", "roll",
    "constant_pad_nd",
}  # fmt: skip
_CASTS = {"convert_element_type", "_to_copy"}


@dataclass(frozen=True, slots=True)
class Origin:
    """A tensor of a graph made from ``leaves`` alone, through which everything made from them passes."""

    node: fx.Node
    leaves: tuple[fx.Node, ...]
    kind: Kind


@dataclass(frozen=True)
class Replay:
    """A piece of the graph as a function of its leaves. Equal texts compute the same."""

    text: str
    module: fx.GraphModule = field(compare=False, repr=False)

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.module(*tensors)
        return result


def origins(nodes: Sequence[fx.Node], fits: Mapping[Kind, Callable[[tuple[int, ...]], bool]]) -> list[Origin]:
    """The last tensors that are only moved bytes, or functions of float inputs alone, one for each set of leaves.

    Args:
        nodes: a cone, inputs before users.
        fits: which shapes the bytes should have, and which the functions of floats must have.
    """
    place = {node: bit for bit, node in enumerate(nodes)}
    readers = [0] * len(nodes)
    for node in nodes:
        for arg in node.all_input_nodes:
            if arg in place:
                readers[place[arg]] |= 1 << place[node]
    kinds: dict[fx.Node, Kind] = {}
    within: dict[fx.Node, int] = {}  # ancestors and itself, as bits
    read_by: dict[fx.Node, int] = {}  # who reads its ancestors
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        kind = _kind(node, kinds)
        if kind is None:
            continue
        kinds[node] = kind
        within[node], read_by[node] = 1 << place[node], 0
        for arg in node.all_input_nodes:
            within[node] |= within[arg]
            read_by[node] |= read_by[arg] | readers[place[arg]]
        shape = shape_hint(node)
        fitting = shape is not None and (kind == "bytes" or node.op != "call_function" or fits[kind](shape))
        if fitting and not read_by[node] & ~within[node]:
            last.update(dict.fromkeys(_leaves(node, within, nodes), node))
    return [
        Origin(_first(node, fits[kinds[node]]), _leaves(node, within, nodes), kinds[node])
        for node in dict.fromkeys(last.values())
    ]


def _first(node: fx.Node, fits: Callable[[tuple[int, ...]], bool]) -> fx.Node:
    """``node`` as it was before it was given another shape, name or precision, in the first shape that fits."""
    found = node
    while _shows_input(node):
        node = node.all_input_nodes[0]
        if node.op != "call_function" or fits(shape_hint(node) or ()):
            found = node
    return found


def _kind(node: fx.Node, kinds: dict[fx.Node, Kind]) -> Kind | None:
    dtype = dtype_of(node)
    if node.op != "call_function":
        if not _is_static(node):
            return None
        value = constant_value(node)
        if dtype in BYTES and (value is None or value.dim() > 1 or value.numel() > _TABLE_BYTES):
            return "bytes"
        return "floats" if dtype in WIDE_FLOATS and value is None else None
    found = {kinds.get(arg) for arg in node.all_input_nodes}
    if found == {"bytes"}:
        picked = node.target is operator.getitem
        return "bytes" if picked or (_name(node) in _MOVING and (dtype is None or dtype in BYTES)) else None
    if found == {"floats"} and _is_pure(node.target) and dtype in WIDE_FLOATS:
        return "floats"
    return None


def _is_static(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)


def _is_pure(target: Any) -> bool:
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace in ("aten", "prims")
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not target._schema.is_mutable
    )


def _leaves(node: fx.Node, within: dict[fx.Node, int], nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    found, bits = [], within[node]
    while bits:
        low = bits & -bits
        member = nodes[low.bit_length() - 1]
        if member.op != "call_function":
            found.append(member)
        bits ^= low
    return tuple(found)


def replay(node: fx.Node, leaves: Sequence[fx.Node]) -> Replay | None:
    """What makes ``node`` from ``leaves``; None where it is its only leaf, but for shape and rounding.

    Raises:
        NoMatch: a size in it is not known.
    """
    if [_first(node, lambda _: False)] == list(leaves):
        return None
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {leaf: graph.placeholder(f"stored_{i}") for i, leaf in enumerate(leaves)}
    for member in _between(node, copies):
        if any(isinstance(arg, torch.SymInt) for arg in torch.utils._pytree.tree_leaves((member.args, member.kwargs))):
            raise NoMatch("{} lies by sizes that are not known", member, node=member)
        args, kwargs = fx.map_arg((member.args, member.kwargs), copies.__getitem__)
        copies[member] = graph.call_function(member.target, args, kwargs)  # type: ignore[arg-type]
    graph.output(copies[node])
    return Replay(str(graph), fx.GraphModule({}, graph))


def _shows_input(node: fx.Node) -> bool:
    """Whether ``node`` is its input in another shape, its bytes under another name, or its numbers rounded."""
    base = node.all_input_nodes[0] if node.all_input_nodes else None
    sizes, given = shape_hint(node), shape_hint(base) if base is not None else None
    if base is None or sizes is None or given is None or prod(sizes) != prod(given):
        return False
    dtypes, name = {dtype_of(node), dtype_of(base)}, _name(node)
    if name in _CASTS:
        return dtypes <= set(WIDE_FLOATS)
    return name in _IN_ORDER and (len(dtypes) == 1 or dtypes <= set(BYTES))


def _name(node: fx.Node) -> str:
    return op_name(node.target) if isinstance(node.target, torch._ops.OpOverload) else ""


def leaves_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """The inputs that ``node`` is made from."""
    return tuple(member for member in cone([node], ()) if member.op != "call_function")


def _between(node: fx.Node, stops: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    order: dict[fx.Node, None] = {}
    stack = [(node, False)]
    while stack:
        current, done = stack.pop()
        if done:
            order[current] = None
        elif current not in order and current not in stops:
            stack.append((current, True))
            stack.extend((arg, False) for arg in reversed(current.all_input_nodes))
    return list(order)


def picked(node: fx.Node) -> tuple[fx.Node, int] | None:
    """The tensor of which ``node`` shows one index of the first axis, and the index; None where it does not."""
    while _shows_input(node) and _name(node) not in ("slice", *_CASTS):
        node = node.all_input_nodes[0]
    return picks(node)


def picks(node: fx.Node) -> tuple[fx.Node, int] | None:
    """The same of the operation that picks."""
    index: object = None
    base = node.all_input_nodes[0] if node.all_input_nodes else None
    if base is not None and is_call(node, operator.getitem):
        whole = arguments(base) if _name(base) in ("unbind", "split", "split_with_sizes") else {"dim": None}
        if whole["dim"] == 0 and _ones(whole):
            base, index = base.all_input_nodes[0], node.args[1]
    elif base is not None and _name(node) in ("select", "slice"):
        given = arguments(node)
        if given["dim"] == 0 and (_name(node) == "select" or (shape_hint(node) or (0,))[0] == 1):
            index = given["index"] if _name(node) == "select" else given["start"] or 0
    count = (shape_hint(base) or (0,))[0] if base is not None and index is not None else 0
    if base is None or not isinstance(index, int) or not -count <= index < count:
        return None
    return base, index % count


def _ones(sizes: dict[str, Any]) -> bool:
    each = sizes.get("split_sizes", sizes.get("split_size", 1))
    return all(size == 1 for size in each) if isinstance(each, list | tuple) else each == 1
