"""One expert of a loop: its linear layers, and the way of its rows into the sum over experts."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from ..matching import NoMatch
from .gemm import settled, through_transposes
from .graph_tools import (
    CAST,
    arguments,
    aten,
    dtype,
    inputs,
    is_call,
    is_zero,
    only_reader,
    readers,
    same,
    same_shape,
    shape,
    source,
)
from .steps import LAYOUT, name_of


@dataclass(frozen=True, slots=True)
class Linear:
    """``out = rows @ weight.T + bias`` with the weight of one expert.

    Attributes:
        node: the GEMM.
        rows: its activations as it reads them.
        weight: ``[N, K]`` behind transposes, ``[K, N]`` if ``k_first``.
        bias: ``[N]``, or None.
        out: the result, bias added; a view that every reader goes through.
        nodes: the steps from ``weight`` and ``bias`` to ``out``, views left out.
    """

    node: fx.Node
    rows: fx.Node
    weight: fx.Node
    k_first: bool
    bias: fx.Node | None
    out: fx.Node
    nodes: frozenset[fx.Node]


def read_linear(node: fx.Node) -> Linear | None:
    """The linear layer of one weight whose GEMM is ``node``; None where it is another operation."""
    if is_call(node, aten.mm.default):
        (rows, weight), bias = inputs(node, "self", "mat2"), None
    elif is_call(node, aten.addmm.default):
        bias, rows, weight, beta, alpha = inputs(node, "self", "mat1", "mat2", "beta", "alpha")
        bias = source(bias)
        if (beta, alpha) != (1, 1) or len(shape(bias)) != 1:
            return None
    else:
        return None
    weight, transposed, passed = through_transposes(weight)
    out, nodes = node, {node, *passed}
    if bias is None:
        out, bias = _with_bias(node)
        nodes.add(out)
    return Linear(node, rows, weight, not transposed, bias, settled(out), frozenset(nodes))


def _with_bias(node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """The sum of a product and a vector that is added to each of its rows, where there is one."""
    found = readers(node)
    if len(found) == 1 and is_call(found[0][0], aten.add.Tensor):
        add, shown = found[0]
        left, right, alpha = inputs(add, "self", "other", "alpha")
        addend = right if left is shown else left
        if isinstance(addend, fx.Node) and alpha == 1 and addend is not shown:
            bias = source(addend)
            if (
                len(shape(bias)) == 1
                and same(shape(bias)[0], shape(node)[1])
                and same(shape(addend)[-1], shape(bias)[0])
            ):
                return add, bias
    return node, None


@dataclass(frozen=True, slots=True)
class Joint:
    """Where an expert's rows meet those of the others.

    Attributes:
        node: the sum so far, this expert's rows included.
        before: the sum without them; None where it is other rows that ``node`` adds them to.
        indices: the tokens of the rows, as they index the sum; None for a row of every token.
        repeats: whether rows of one token add up.
        nodes: the steps inside.
        place: where the rows stand among those of all experts, in a stack of them.
    """

    node: fx.Node
    before: object
    indices: tuple[fx.Node | None, ...] | None
    repeats: bool
    nodes: frozenset[fx.Node]
    place: int | None = None


@dataclass(frozen=True, slots=True)
class Chain:
    """One expert.

    Attributes:
        ups: the first linear layer, or gate and up; ``down`` is the last.
        factors: what scales the rows that come out: a node for each, and whether it is a mask.
        joint: where they go.
        nodes: the steps from ``down`` to the joint.
    """

    ups: tuple[Linear, ...]
    down: Linear
    factors: tuple[fx.Node, ...]
    joint: Joint
    nodes: frozenset[fx.Node]

    @property
    def gemms(self) -> tuple[fx.Node, ...]:
        return tuple(layer.node for layer in (*self.ups, self.down))


def first_layers(linears: Mapping[fx.Node, Linear]) -> dict[fx.Node, tuple[Linear, ...]]:
    """For every linear layer that could be an expert's last one, the one or two that it reads from."""
    by_rows: dict[fx.Node, tuple[Linear, ...]] = {}
    for linear in linears.values():
        if linear.rows not in by_rows:
            by_rows[linear.rows] = _nearest(linear.rows, linears)
    found = {node: by_rows[linear.rows] for node, linear in linears.items()}
    return {node: ups for node, ups in found.items() if 1 <= len(ups) <= 2}


_MAX_STEPS = 100
"""Nodes of an activation."""


def _nearest(rows: fx.Node, linears: Mapping[fx.Node, Linear]) -> tuple[Linear, ...]:
    """The linear layers that ``rows`` come from through what an activation is made of; none where these are many."""
    found: list[fx.Node] = []
    pending = [rows]
    for node in pending:
        if node in linears:
            found.append(node)
        elif node is rows or is_call(node, CAST) or name_of(node) in LAYOUT or _is_elementwise(node):
            pending += [arg for arg in node.all_input_nodes if arg not in pending]
        if len(found) > 2 or len(pending) > _MAX_STEPS:
            return ()
    return tuple(linears[node] for node in sorted(found))


def _is_elementwise(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def read_chain(ups: tuple[Linear, ...], down: Linear) -> Chain:
    """Follow the rows of ``down`` to where they meet other experts'.

    Raises:
        NoMatch: a step that is none of an expert's.
    """
    node, factors, steps = down.out, list[fx.Node](), set[fx.Node]()
    while True:
        reader, shown = only_reader(node, "an expert's rows")
        if is_call(reader, CAST) and dtype(reader).is_floating_point and dtype(reader).itemsize >= 2:
            pass
        elif is_call(reader, aten.mul.Tensor):
            factors.append(factor_of(reader, shown))
        elif is_call(reader, aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.masked_fill.Scalar):
            factors.append(reader)
        elif not _adds_nothing(reader):
            joint = _joint(reader, shown)
            return Chain(ups, down, tuple(factors), joint, frozenset(steps) | joint.nodes)
        steps.add(reader)
        node = reader


def factor_of(reader: fx.Node, shown: fx.Node) -> fx.Node:
    """What the product ``reader`` multiplies the rows ``shown`` by: one weight a row.

    Raises:
        NoMatch: something else.
    """
    left, right = inputs(reader, "self", "other")
    factor = right if left is shown else left
    if not isinstance(factor, fx.Node) or factor is shown:
        raise NoMatch("{} scales the rows of one expert by {}", reader.name, factor, node=reader)
    if not same_shape(factor, (*shape(shown)[:-1], 1)):
        raise NoMatch("{} is not one weight a row", factor.name, node=factor)
    return factor


def _adds_nothing(reader: fx.Node) -> bool:
    return is_call(reader, aten.add.Tensor, aten.add.Scalar) and arguments(reader)["other"] == 0


def _joint(reader: fx.Node, shown: fx.Node) -> Joint:
    args = arguments(reader) if reader.op == "call_function" and hasattr(reader.target, "_schema") else {}
    if is_call(reader, aten.index_add.default) and args["source"] is shown and args["alpha"] == 1:
        if args["dim"] in (0, -2):
            return Joint(reader, args["self"], (args["index"],), True, frozenset({reader}))
    elif is_call(reader, aten.scatter_add.default) and args["src"] is shown and args["dim"] in (0, -2):
        index = args["index"]
        if is_call(index, aten.expand.default) and same_shape(arguments(index)["self"], (shape(shown)[0], 1)):
            return Joint(reader, args["self"], (source(arguments(index)["self"]),), True, frozenset({reader, index}))
    elif is_call(reader, aten.index_put.default) and args["values"] is shown and args["accumulate"]:
        return Joint(reader, args["self"], tuple(args["indices"]), True, frozenset({reader}))
    elif is_call(reader, aten.cat.default) and list(args["tensors"]).count(shown) == 1:
        return Joint(reader, None, None, True, frozenset({reader}), args["tensors"].index(shown))
    elif is_call(reader, aten.add.Tensor) and args["alpha"] == 1:
        left, right = args["self"], args["other"]
        other = right if left is shown else left
        if isinstance(other, fx.Node) and other is not shown and same_shape(other, shape(shown)):
            return _put(reader, source(other)) or Joint(reader, other, None, True, frozenset({reader}))
    raise NoMatch("{} ({}) is no sum over experts", reader.name, reader.target, node=reader)


def _put(add: fx.Node, before: fx.Node) -> Joint | None:
    """``sum[tokens] = sum[tokens] + rows`` around its addition."""
    found = readers(add)
    if len(found) != 1 or not is_call(found[0][0], aten.index_put.default) or not is_call(before, aten.index.Tensor):
        return None
    put, shown = found[0]
    total, indices, values, accumulates = inputs(put, "self", "indices", "values", "accumulate")
    if values is not shown or accumulates or inputs(before, "self", "indices") != [total, indices]:
        raise NoMatch("{} does not put rows back to where they were read", put.name, node=put)
    return Joint(put, total, tuple(indices), False, frozenset({put, add, before}))


def group_by_sum(chains: Collection[Chain]) -> list[tuple[list[Chain], object]]:
    """The chains of every sum over experts, and what each sum starts from (None: from its first rows)."""
    joints: dict[fx.Node, list[Chain]] = {}
    for chain in chains:
        joints.setdefault(chain.joint.node, []).append(chain)
    last: dict[fx.Node, fx.Node] = {}
    after = {_before(joint[0]): node for node, joint in joints.items()}
    groups: dict[fx.Node, list[Chain]] = {}
    starts: dict[fx.Node, object] = {}
    for node, joined in joints.items():
        trail = [node]
        while trail[-1] not in last and trail[-1] in after:
            trail.append(after[trail[-1]])
        end = last.get(trail[-1], trail[-1])
        last.update(dict.fromkeys(trail, end))
        groups.setdefault(end, []).extend(joined)
        if _before(joined[0]) not in joints:
            starts[end] = None if len(joined) == 2 else joined[0].joint.before
    return [(groups[end], starts.get(end)) for end in groups]


def _before(chain: Chain) -> fx.Node | None:
    before = chain.joint.before
    return source(before) if isinstance(before, fx.Node) else None


def starts_from_nothing(start: object) -> bool:
    return start is None or is_zero(source(start))
