"""``_grouped_mm`` over tokens sorted by expert, with offsets counted from the same expert ids."""

from __future__ import annotations

from torch import fx

from ..matching import NoMatch
from .gemm import ExpertGemm, through_transposes
from .graph_tools import arguments, aten, inputs, is_call, is_iota, same, shape, source, stage
from .rows import RowOrder, integer_cast, order_from_counts

NAME = "grouped_mm"

_ARGUMENTS = {
    "aten::_grouped_mm": ("self", "mat2", "offs"),
    "transformers::grouped_mm_fallback": ("input", "weight", "offs"),
}
"""The names of rows, weights and offsets, by op. The second op exists only once transformers is imported."""


def operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """Rows ``[S, K]``, weights ``[E, K, N]`` and offsets of a grouped GEMM, or None where it is none."""
    schema = getattr(node.target, "_schema", None)
    names = _ARGUMENTS.get(schema.name) if node.op == "call_function" and schema is not None else None
    if names is None:
        return None
    args = arguments(node)
    rows, weight, offs = (args[name] for name in names)
    return rows, weight, offs


def read_grouped_mm(node: fx.Node) -> ExpertGemm:
    """Read a grouped GEMM whose groups are the experts of its rows.

    Raises:
        NoMatch: it is none, or its groups are something else.
    """
    found = operands(node)
    if found is None:
        raise NoMatch("{} is no grouped GEMM", node.name, node=node)
    rows, weight, offs = found
    if offs is None or arguments(node).get("bias") is not None or len(shape(weight)) != 3:
        raise NoMatch("{} is not a GEMM of 2-D rows by 3-D weights with offsets", node.name, node=node, progress=0.1)
    with stage(0.2):
        order = _order_from_offsets(offs, shape(weight)[0])
    weight, flipped, transposes = through_transposes(weight)
    return ExpertGemm(node, NAME, rows, weight, not flipped, order, transposes | {node})


def _order_from_offsets(offs: fx.Node, num_experts: object) -> RowOrder:
    """The order of rows from the offsets ``cumsum(count of each expert)``."""
    total = integer_cast(offs)
    if not is_call(total, aten.cumsum.default) or arguments(total)["dim"] not in (0, -1):
        raise NoMatch("offsets {} are no running sum", total.name, node=total)
    counts = integer_cast(arguments(total)["self"])
    return order_from_counts(_counted(counts, num_experts))


def _counted(counts: fx.Node, num_experts: object) -> fx.Node:
    """The flat expert ids that ``counts`` counts for every expert."""
    if is_call(counts, aten.histc.default):
        args = arguments(counts)
        if same(args["bins"], num_experts) and args["min"] == 0 and same(args["max"], int(args["bins"]) - 1):
            return integer_cast(args["self"])
    elif is_call(counts, aten.bincount.default):
        args = arguments(counts)
        if args["weights"] is None and same(args["minlength"], num_experts):
            return integer_cast(args["self"])
    elif is_call(counts, aten.sum.dim_IntList):
        compared = _one_hot(integer_cast(arguments(counts)["self"]), num_experts)
        if compared is not None and arguments(counts)["dim"] in ([0], [-2]):
            return compared
    raise NoMatch("offsets do not count the tokens of each of {} experts", num_experts, node=counts)


def _one_hot(node: fx.Node, num_experts: object) -> fx.Node | None:
    """ids where ``node`` is ``ids[:, None] == arange(E)``."""
    if not is_call(node, aten.eq.Tensor):
        return None
    ids, experts = inputs(node, "self", "other")
    if not isinstance(ids, fx.Node) or not isinstance(experts, fx.Node):
        return None
    column = len(shape(ids)) == 2 and same(shape(ids)[1], 1)
    return integer_cast(ids) if column and is_iota(source(experts), num_experts) else None  # type: ignore[arg-type]
