"""Grouped and gathered GEMMs over experts, read into one value; each form has its own file."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from ..matching import NoMatch
from .graph_tools import (
    CAST,
    arguments,
    aten,
    dtype,
    inputs,
    is_call,
    is_size,
    numel,
    readers,
    row_gather,
    same,
    shape,
    source,
    swaps_last_two,
    tensor,
    viewed,
)
from .masks import unmasked
from .rows import RowOrder


@dataclass(frozen=True, slots=True)
class ExpertGemm:
    """``out[s] = W[expert of row s] @ rows[s]`` for T*k rows.

    Attributes:
        node: the GEMM.
        form: name of the pattern that read it.
        rows: the activations as the GEMM reads them, ``[T*k, K]`` behind views.
        weight: the experts' weights behind matrix transposes: ``[E, N, K]``, or ``[E, K, N]`` if ``k_first``.
        order: which expert, token and slot each row holds.
        nodes: the GEMM and the nodes between it and ``weight``, views left out.
    """

    node: fx.Node
    form: str
    rows: fx.Node
    weight: fx.Node
    k_first: bool
    order: RowOrder
    nodes: frozenset[fx.Node]

    @property
    def sizes(self) -> tuple[int | object, int | object, int | object]:
        """E, N, K."""
        experts, first, second = shape(self.weight)
        return (experts, second, first) if self.k_first else (experts, first, second)


@dataclass(frozen=True, slots=True)
class Projection:
    """An expert GEMM with its bias.

    Attributes:
        out: the result ``[T*k, N]``, bias added, rows of no expert masked; a view that every reader goes through.
        bias: ``[E, N]``, or None.
        nodes: the steps from GEMM to ``out``, views left out.
        masked: whether rows of no expert are zeroed.
    """

    gemm: ExpertGemm
    out: fx.Node
    bias: fx.Node | None
    nodes: frozenset[fx.Node]
    masked: bool = False


def through_transposes(node: fx.Node) -> tuple[fx.Node, bool, frozenset[fx.Node]]:
    """The node behind matrix transposes and copies, whether it is transposed against ``node``, and the transposes."""
    passed: set[fx.Node] = set()
    while swaps_last_two(node) or is_call(node, aten.clone.default):
        if swaps_last_two(node):
            passed.add(node)
        node = arguments(node)["self"]
    return node, len(passed) % 2 == 1, frozenset(passed)


def behind(down: fx.Node, rows: fx.Node, gemms: Collection[fx.Node]) -> list[fx.Node]:
    """Those of ``gemms`` that ``rows`` of the GEMM ``down`` come from, through values as large or twice as large."""
    if tensor(rows) is None:
        return []
    size = numel(rows)
    found: list[fx.Node] = []
    seen = {rows}
    pending = [rows]
    while pending:
        node = pending.pop()
        if node in gemms and node is not down:
            found.append(node)
            continue
        for arg in node.all_input_nodes:
            if arg not in seen and _as_large(arg, size):
                seen.add(arg)
                pending.append(arg)
    return sorted(found)


def _as_large(node: fx.Node, size: int | torch.SymInt) -> bool:
    val = node.meta.get("val")
    if isinstance(val, tuple | list):
        return True
    if not isinstance(val, torch.Tensor) or is_size(node):
        return False
    return same(numel(node), size) or same(numel(node), size * 2)


def read_projection(gemm: ExpertGemm) -> Projection:
    """The GEMM with the experts' bias that is added to its rows and the mask over the sum, where there are any.

    Raises:
        NoMatch: something is added that is no bias of the row's expert, or other rows are masked.
    """
    out, bias, nodes = _with_bias(gemm)
    found = readers(out)
    if len(found) == 1 and unmasked(found[0][0], gemm.order, gemm.sizes[0]) is found[0][1]:
        mask = found[0][0]
        return Projection(gemm, settled(mask), bias, nodes | {mask}, masked=True)
    return Projection(gemm, settled(out), bias, nodes)


def _with_bias(gemm: ExpertGemm) -> tuple[fx.Node, fx.Node | None, frozenset[fx.Node]]:
    """The rows with their bias, the bias ``[E, N]`` if there is one, and the nodes up to there."""
    found = readers(gemm.node)
    if len(found) != 1 or not is_call(found[0][0], aten.add.Tensor):
        return gemm.node, None, gemm.nodes
    add, shown = found[0]
    left, right, alpha = inputs(add, "self", "other", "alpha")
    addend = right if left is shown else left
    if not isinstance(addend, fx.Node) or alpha != 1:
        return gemm.node, None, gemm.nodes
    read = source(addend)
    nodes = {add, read}
    if is_call(read, CAST) and dtype(read).is_floating_point:
        read = source(arguments(read)["a"])
        nodes.add(read)
    gather = row_gather(read)
    if gather is None:
        raise NoMatch("{} adds {} to the rows of {}, which is no bias", add.name, read.name, gemm.node.name, node=add)
    bias, index = gather
    experts, rows, _ = gemm.sizes
    if not gemm.order.holds_experts(index, experts):
        raise NoMatch("the bias {} is not gathered by the experts of the rows", bias.name, node=read)
    if len(shape(bias)) != 2 or not same(shape(bias)[0], experts) or not same(shape(bias)[1], rows):
        raise NoMatch("the bias {} is not [E, N]", bias.name, node=bias)
    return add, bias, gemm.nodes | nodes


def settled(node: fx.Node) -> fx.Node:
    """The last view of ``node`` with two axes that all its readers go through, or ``node``."""
    shown = found = node
    while len(shown.users) == 1:
        user = next(iter(shown.users))
        if viewed(user) is not shown:
            break
        shown = user
        if len(shape(shown)) == 2:
            found = shown
    return found
