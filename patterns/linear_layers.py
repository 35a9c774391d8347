"""FP4 weights that are in no block because they are none's: linear layers that every token goes through.

Attention and shared experts have such layers. They run dequantised, which is as they are written, so nothing was
missed. An expert of an unrecognised loop looks much the same, so a layer counts only where nothing chooses rows for it
or weighs what it gives by a choice, and where no layer of its shape goes another way from the same rows.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import fx

from .expert_chain import Linear, read_linear
from .graph_tools import CAST, arguments, aten, inputs, is_call, numel, readers, same, same_shape, shape, source, tensor
from .near_misses import INPUT_NAME
from .packed import is_gemm
from .steps import LAYOUT, name_of

_CHOOSING = {
    "index", "index_select", "gather", "masked_select", "take", "nonzero", "where", "masked_fill", "eq", "ne",
    "index_add", "index_put", "index_copy", "scatter", "scatter_add", "scatter_reduce", "topk", "sort", "argmax",
    "max", "one_hot",
}  # fmt: skip
_COMPARISONS = {"gt", "ge", "lt", "le"}
_ONE_OF_MANY = re.compile(r"(?<!shared_)experts?([._](\w+[._])?)?\d+\b")
"""In the name of a parameter. A graph that holds one expert alone says nothing else of the others."""
_MAX_STEPS = 200
"""Nodes between two layers."""


def linear_layers(
    reads: Mapping[fx.Node, frozenset[fx.Node]], roots: Collection[fx.Node], blocks: Collection[fx.Node]
) -> frozenset[fx.Node]:
    """Those of ``roots`` that are weights of linear layers which every token goes through.

    Args:
        reads: the packed weights that each GEMM reads.
        roots: weights that are in no block.
        blocks: outputs of the blocks that were recognised.
    """
    gemms = [gemm for gemm, found in reads.items() if not found.isdisjoint(roots)]
    linears = {gemm: linear for gemm in gemms if (linear := _whole_linear(gemm, reads[gemm])) is not None}
    experts = {root for gemm in gemms if gemm not in linears for root in reads[gemm]}
    groups = _Groups(linears)
    doubtful = set(_parted(list(linears.values())))
    for gemm, linear in linears.items():
        before, chosen = _before(linear.rows, linears, blocks)
        for other in before:
            groups.join(gemm, other)
        if chosen or _is_weighed(linear.out) or any(_ONE_OF_MANY.search(_name(root)) for root in reads[gemm]):
            doubtful.add(gemm)
    wrong = {groups.of(gemm) for gemm in doubtful}
    experts |= {root for gemm in linears if groups.of(gemm) in wrong for root in reads[gemm]}
    read = frozenset().union(*(reads[gemm] for gemm in linears))
    return frozenset(root for root in roots if root in read and root not in experts)


def _whole_linear(gemm: fx.Node, roots: frozenset[fx.Node]) -> Linear | None:
    """The layer of ``gemm`` if it reads one packed weight, and all of it."""
    linear = read_linear(gemm)
    if linear is None or len(roots) != 1:
        return None
    return linear if same(numel(linear.weight), 2 * numel(next(iter(roots)))) else None


class _Groups:
    """Layers that follow each other: what is said of one holds for all."""

    def __init__(self, members: Collection[fx.Node]) -> None:
        self._parent = {member: member for member in members}

    def of(self, member: fx.Node) -> fx.Node:
        while self._parent[member] is not member:
            member = self._parent[member]
        return member

    def join(self, one: fx.Node, other: fx.Node) -> None:
        self._parent[self.of(one)] = self.of(other)


def _before(rows: fx.Node, linears: Collection[fx.Node], ends: Collection[fx.Node]) -> tuple[list[fx.Node], bool]:
    """The layers that ``rows`` come from by steps on single elements, back to a sum, and whether one of them chooses.

    More steps than an activation or a norm has count as a choice.
    """
    found: list[fx.Node] = []
    pending = [rows]
    for node in pending:
        if node in linears:
            found.append(node)
        elif _chooses(node) or len(pending) > _MAX_STEPS:
            return found, True
        elif node not in ends and _passes(node) and not _is_sum(node):
            pending += [arg for arg in node.all_input_nodes if arg not in pending]
    return found, False


def _is_weighed(out: fx.Node) -> bool:
    """Whether rows of a layer are multiplied by what was chosen, or put where it says, before they are added up."""
    pending = [out]
    for node in pending:
        for reader, shown in readers(node):
            if _chooses(reader) or len(pending) > _MAX_STEPS:
                return True
            others = [arg for arg in reader.all_input_nodes if arg is not shown]
            if not is_gemm(reader) and not _is_sum(reader) and _passes(reader):
                if any(_is_by_choice(other) for other in others if _is_column(other)):
                    return True
                pending += [reader] if reader not in pending else []
    return False


def _is_by_choice(factor: fx.Node) -> bool:
    """Whether a choice decides one number a row. What a GEMM gives, as a shared expert's gate, was not chosen."""
    pending = [factor]
    for node in pending:
        if _chooses(node) or len(pending) > _MAX_STEPS:
            return True
        if not is_gemm(node) and not _is_sum(node):
            pending += [arg for arg in node.all_input_nodes if arg not in pending]
    return False


def _parted(linears: Sequence[Linear]) -> Iterator[fx.Node]:
    """Layers of one shape that read the same rows and lead to different layers, as experts do."""
    alike: dict[tuple[object, ...], list[Linear]] = defaultdict(list)
    for linear in linears:
        alike[(_unscaled(linear.rows), linear.k_first, str(shape(linear.weight)))].append(linear)
    for group in alike.values():
        if len(group) > 1 and len({_after(linear.node) for linear in group}) > 1:
            yield from (linear.node for linear in group)


def _unscaled(rows: fx.Node) -> fx.Node:
    """What ``rows`` are, one number a row and roundings left out."""
    while True:
        rows = source(rows)
        if is_call(rows, CAST):
            rows = arguments(rows)["a"]
            continue
        if not is_call(rows, aten.mul.Tensor):
            return rows
        left, right = inputs(rows, "self", "other")
        scaled = [one for one, other in ((left, right), (right, left)) if _is_column(other) and not _is_column(one)]
        if len(scaled) != 1:
            return rows
        rows = scaled[0]


def _after(gemm: fx.Node) -> frozenset[fx.Node]:
    """The next products of matrices that what ``gemm`` gives goes into."""
    found, seen, pending = set[fx.Node](), {gemm}, [gemm]
    while pending:
        for user in pending.pop().users:
            if is_call(user, aten.mm.default, aten.addmm.default):
                found.add(user)
            elif user not in seen:
                seen.add(user)
                pending.append(user)
    return frozenset(found)


def _is_column(node: object) -> bool:
    val = tensor(node)
    return val is not None and val.dim() > 0 and same(val.shape[-1], 1)


def _is_sum(node: fx.Node) -> bool:
    """Whether ``node`` adds two tensors of its own size."""
    return is_call(node, aten.add.Tensor) and all(
        tensor(arg) is not None and same_shape(arg, shape(node)) for arg in inputs(node, "self", "other")
    )


def _chooses(node: fx.Node) -> bool:
    if is_call(node, aten.embedding.default):
        table: fx.Node = arguments(node)["weight"]
        return source(table).op == "call_function"  # rows that the graph computes; tokens' are a parameter's
    if is_call(node, aten.where.self):  # of values by their own size, as in softplus, or of rows
        compared = source(arguments(node)["condition"])
        return name_of(compared) not in _COMPARISONS or not same_shape(compared, shape(node))
    return name_of(node) in _CHOOSING


def _passes(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is operator.getitem:
        return node.op == "call_function"
    is_pointwise = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
    return is_pointwise or name_of(node) in LAYOUT or is_call(node, CAST)


def _name(root: fx.Node) -> str:
    return str(root.meta.get(INPUT_NAME, ""))
