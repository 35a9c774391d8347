"""Products of tokens with the weights of branches, which are all experts or each token's own k slots.

Axes are called T (tokens), E (experts), k (slots), H (hidden columns that go in), N (rows of w13), I (inner
columns) and O (hidden columns that come out).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import fx

from ..matching import NoMatch
from .axes import Axis, Layout, along, axes, broadcast, laid_out, moved, moves, multiplied, names, trail, unified
from .graph_tools import aten, dtype, inputs, is_call, is_size, row_gather, same, same_shape, shape
from .packed import is_gemm
from .rows import is_choice, unbounded

_CLAMPS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)


@dataclass(frozen=True, slots=True)
class BranchGemm:
    """``mm`` or ``bmm`` of ``rows`` with the weights of branches.

    Attributes:
        rows: the activations, the first operand if ``rows_first``.
        weight: the weights of all experts, ``[E, N, K]`` or ``[E, K, N]``.
        before, behind: from ``weight`` to where weights of the chosen experts are gathered, and from there to the
            GEMM; where nothing is gathered, all is before.
        index: the expert ids by which weights are gathered, or None.
    """

    node: fx.Node
    rows: fx.Node
    rows_first: bool
    weight: fx.Node
    before: tuple[fx.Node, ...]
    behind: tuple[fx.Node, ...]
    index: fx.Node | None

    @property
    def nodes(self) -> frozenset[fx.Node]:
        """The GEMM and the steps from the weight to it."""
        return frozenset({self.node, *self.before[1:], *self.behind})

    def product(self, rows: Layout, weight: Layout) -> tuple[Layout, set[str]]:
        """The layout of the result, and the names of what is summed over.

        Raises:
            NoMatch: rows and weights do not meet axis by axis.
        """
        found = multiplied(rows, weight) if self.rows_first else multiplied(weight, rows)
        if found is None:
            raise NoMatch("{} multiplies rows with weights of others", self.node.name, node=self.node)
        return found[0], {axis.name for axis in found[1]}

    def weight_layout(self, rows: Axis, columns: Axis, *, k_first: bool) -> Layout:
        """The layout of the weights as the GEMM reads them.

        Raises:
            NoMatch: experts are gathered along another axis, or a view mixes axes.
        """
        order = (columns.name, rows.name) if k_first else (rows.name, columns.name)
        stored = laid_out(shape(self.weight), ("E", 1), *((name, 1) for name in order))
        layout = along(stored, self.before)
        if self.index is None:
            return layout
        return along(self.picked(layout, shape(self.weight)[0]), self.behind)

    def picked(self, layout: Layout, num_experts: object) -> Layout:
        """The layout of what is gathered by ``index`` from something whose first axis are the experts."""
        assert self.index is not None
        return picked(layout, self.index, num_experts)


def read_branch_gemm(node: fx.Node, roots: Collection[fx.Node]) -> BranchGemm:
    """Read a GEMM one of whose operands depends on the packed ``roots``.

    Raises:
        NoMatch: no weights of several experts stand on one side.
    """
    if not is_call(node, aten.bmm.default, aten.mm.default):
        raise NoMatch("{} is neither mm nor bmm", node.name, node=node)
    operands = inputs(node, "self", "mat2")
    packed = [_depends(operand, roots) for operand in operands]
    if sum(packed) != 1:
        raise NoMatch("{} does not multiply activations with FP4 weights", node.name, node=node)
    rows_first = packed[1]
    rows, weights = operands if rows_first else operands[::-1]
    behind = trail(weights)
    gather = row_gather(behind[0])
    before, index = (trail(gather[0]), gather[1]) if gather is not None else (behind, None)
    weight = next((step for step in before if len(shape(step)) == 3 and dtype(step).is_floating_point), None)
    if weight is None:
        raise NoMatch("{} reads no weights [E, N, K]", node.name, node=node)
    before = before[before.index(weight) :]
    return BranchGemm(node, rows, rows_first, weight, tuple(before), tuple(behind) if gather else (), index)


def _depends(node: fx.Node, roots: Collection[fx.Node]) -> bool:
    """Whether ``node`` depends on one of ``roots`` without a GEMM between."""
    pending, seen = [node], {node}
    while pending:
        found = pending.pop()
        if found in roots:
            return True
        for arg in [] if is_gemm(found) else found.all_input_nodes:
            if arg not in seen:
                seen.add(arg)
                pending.append(arg)
    return False


def picked(layout: Layout, index: fx.Node, num_experts: object) -> Layout:
    """The layout of ``x[index]`` where x has ``layout``, its first axis the experts.

    Raises:
        NoMatch: its first axis is another.
    """
    if [axis.name for axis in layout[0]] not in (["E"], []) or "E" in names(layout[1:]):
        raise NoMatch("{} does not pick experts", index.name, node=index)
    return (*read_ids(index, num_experts)[1], *layout[1:])


def read_ids(index: fx.Node, num_experts: object) -> tuple[fx.Node, Layout]:
    """The expert ids ``[..., k]`` (or ``[T]`` of one slot) behind ``index``, and the layout of ``index``.

    Bounds are left out where no id needs them.

    Raises:
        NoMatch: the ids lie otherwise, or are bounded by others than the experts.
    """
    steps = trail(index)
    ids, inner = steps[0], None
    if is_call(ids, *_CLAMPS):
        behind = unbounded(ids, num_experts)
        if is_choice(behind, num_experts):
            ids, inner = read_ids(inputs(ids, "self")[0], num_experts)
    return ids, along(slot_layout(ids) if inner is None else inner, steps)


def slot_layout(node: fx.Node) -> Layout:
    """The layout of values ``[..., k]``, tokens first, or ``[T]`` of one slot.

    Raises:
        NoMatch: k is no constant.
    """
    sizes = shape(node)
    if len(sizes) < 2:
        return laid_out(sizes, ("T", len(sizes)))
    if not isinstance(sizes[-1], int):
        raise NoMatch("{} is not [T, k] with a constant k", node.name, node=node)
    return laid_out(sizes, ("T", len(sizes) - 1), ("k", 1))


def values_of(node: fx.Node) -> list[fx.Node]:
    """The users of ``node`` that read more than its sizes, themselves or through views."""
    return [user for user in node.users if not _reads_sizes(user)]


def _reads_sizes(user: fx.Node) -> bool:
    return is_size(user) or (moves(user) is not None and bool(user.users) and all(map(_reads_sizes, user.users)))


def onward(node: fx.Node, layout: Layout) -> Iterator[tuple[fx.Node, Layout]]:
    """``node`` and what its only readers make of it by moving elements, each with its layout."""
    while True:
        yield node, layout
        users = values_of(node)
        if len(users) != 1 or moves(users[0]) is not node:
            return
        user = users[0]
        try:
            node, layout = user, moved(user, layout)
        except NoMatch:
            return


@dataclass(frozen=True, slots=True)
class Biased:
    """A product with its bias ``[E, N]``, or None; ``nodes``: the steps from the GEMM on."""

    node: fx.Node
    layout: Layout
    bias: fx.Node | None
    nodes: frozenset[fx.Node]


def with_bias(gemm: BranchGemm, layout: Layout, column: Axis) -> Biased:
    """A product and the bias of each branch that is added to it, if there is one.

    Raises:
        NoMatch: something else is added.
    """
    way = list(onward(gemm.node, layout))
    shown, laid = way[-1]
    plain = Biased(gemm.node, layout, None, frozenset())
    users = values_of(shown)
    if len(users) != 1 or not is_call(users[0], aten.add.Tensor):
        return plain
    add = users[0]
    left, right, alpha = inputs(add, "self", "other", "alpha")
    addend = right if left is shown else left
    if not isinstance(addend, fx.Node) or len(shape(addend)) == 0:
        return plain
    steps = trail(addend, casts=True)
    gather = row_gather(steps[0])
    inner = trail(gather[0], casts=True) if gather is not None else steps
    bias = next((step for step in inner if _is_bias(step, gemm, column)), None)
    if bias is None or alpha != 1 or (gather is None) != (gemm.index is None):
        raise NoMatch("{} adds {}, which is no bias [E, N]", add.name, addend.name, node=add)
    inner = inner[inner.index(bias) :]
    added = along(laid_out(shape(bias), ("E", 1), (column.name, 1)), inner)
    if gather is not None and gemm.index is not None:
        experts = shape(gemm.weight)[0]
        if read_ids(gather[1], experts)[0] is not read_ids(gemm.index, experts)[0]:
            raise NoMatch("{} adds biases of other experts", add.name, node=add)
        added = along(picked(added, gather[1], experts), steps)
    total = broadcast(laid, added)
    if total is None or not same_shape(add, shape(shown)) or names(added) - names(laid):
        raise NoMatch("{} does not add each branch's own bias", add.name, node=add)
    used = {add, *(node for node, _ in way), *inner[1:], *(steps if gather is not None else ())}
    return Biased(add, laid, bias, frozenset(used))


def _is_bias(node: fx.Node, gemm: BranchGemm, column: Axis) -> bool:
    sizes = shape(node)
    return len(sizes) == 2 and same(sizes[0], shape(gemm.weight)[0]) and same(sizes[1], column.size)


def holds_only(layout: Layout, *wanted: Axis) -> bool:
    """Whether a layout runs over these axes alone, each whole, in any order."""
    found = sorted(axes(layout), key=lambda axis: axis.name)
    kept = sorted((axis for axis in wanted if not same(axis.size, 1)), key=lambda axis: axis.name)
    return len(found) == len(kept) and all(
        a.name == b.name and unified((a,), (b,)) is not None for a, b in zip(found, kept, strict=True)
    )


def columns_of(layout: Layout, column: Axis) -> int | None:
    """The dimension that holds nothing but ``column``, whole, or None."""
    return next((place for place, dim in enumerate(layout) if dim and holds_only((dim,), column)), None)
