"""``bmm`` of each row with its expert's weights, gathered by the expert ids."""

from __future__ import annotations

from torch import fx

from ..matching import NoMatch
from .gemm import ExpertGemm, through_transposes
from .graph_tools import aten, inputs, is_call, row_gather, same, shape, stage, viewed
from .rows import slot_order

NAME = "batched_mm"


def read_batched_mm(node: fx.Node) -> ExpertGemm:
    """Read ``bmm(W[ids] [S, N, K], x [S, K, 1])`` or ``bmm(x [S, 1, K], W[ids] [S, K, N])``.

    Raises:
        NoMatch: it is none of them.
    """
    if not is_call(node, aten.bmm.default):
        raise NoMatch("{} is no batched GEMM", node.name, node=node)
    left, right = inputs(node, "self", "mat2")
    if same(shape(right)[2], 1):
        stack, rows, k_first = left, right, False
    elif same(shape(left)[1], 1):
        stack, rows, k_first = right, left, True
    else:
        raise NoMatch("{} multiplies no single rows", node.name, node=node, progress=0.1)
    gathered, flipped, outside = _through_views(stack)
    gather = row_gather(gathered)
    if gather is None:
        raise NoMatch("the weights of {} are not gathered by expert", node.name, node=node, progress=0.1)
    weight, index = gather
    if len(shape(weight)) != 3:
        raise NoMatch("{} gathers from {} axes, not [E, N, K]", gathered.name, len(shape(weight)), node=gathered)
    weight, flipped_inside, inside = through_transposes(weight)
    with stage(0.2):
        order = slot_order(index, shape(weight)[0])
    nodes = outside | inside | {node, gathered}
    return ExpertGemm(node, NAME, rows, weight, k_first ^ flipped ^ flipped_inside, order, nodes)


def _through_views(node: fx.Node) -> tuple[fx.Node, bool, frozenset[fx.Node]]:
    """As ``through_transposes``, and through views of the leading axes."""
    flipped, passed = False, frozenset[fx.Node]()
    while True:
        node, more, transposes = through_transposes(node)
        flipped, passed = flipped ^ more, passed | transposes
        base = viewed(node)
        if base is None or len(shape(base)) < 3 or not all(map(same, shape(base)[-2:], shape(node)[-2:])):
            return node, flipped, passed
        node = base
