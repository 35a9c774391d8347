"""Blocks in which tokens run over branches side by side: over all experts, or each over its own k slots.

All experts run on all tokens and a matrix of scores, zero but at the chosen experts, picks from them. Or the
weights of the chosen experts are gathered for every token. However products are spelled (``einsum`` lowers to
many), axes say what each value is: the first products sum over hidden columns, the last over inner ones, and the
combine over branches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import fx

from ..matching import NoMatch, PackedWeight
from ..spec import Operand
from .activation import IdentifiedActivation
from .axes import Axis, Dimension, Layout, along, axes, axis_over, laid_out, regrouped, trail, unified
from .block import Block, Candidate, Feed
from .branch_combine import Branches, Way, combine_branches, read_routing, weigh
from .branches import Biased, BranchGemm, columns_of, holds_only, onward, read_branch_gemm, read_ids, with_bias
from .column_major import identify_in_columns
from .dequantize import identify
from .gemm import behind
from .graph_tools import CAST, arguments, aten, dtype, inputs, is_call, same, shape, stage, unwidened
from .near_misses import Misses
from .probing import cone
from .signature import Memo
from .weights import check_fit, join_halves, join_sources

DENSE = "dense"
GATHERED = "batched_mm"


def candidates(gemms: Sequence[fx.Node], misses: Misses) -> Iterator[Candidate]:
    """Every down GEMM with the GEMMs that it reads from, first with weights on what comes out, then on what goes in."""
    read: dict[fx.Node, BranchGemm] = {}
    for node in gemms:
        try:
            read[node] = read_branch_gemm(node, misses.reads[node])
            unread = NoMatch("no second expert GEMM reads what {} gives", node.name, node=node, progress=0.25)
            misses.keep(_form(read[node]), unread, node)
        except NoMatch as miss:
            misses.keep(DENSE, miss, node)
    for down in read.values():
        ups = [read[node] for node in behind(down.node, down.rows, read)]
        if ups:
            nodes = tuple(gemm.node for gemm in (*ups, down))
            for on_input in (False, True):
                yield Candidate(_form(down), nodes, partial(read_branches, ups, down, weight_on_input=on_input))


def _form(gemm: BranchGemm) -> str:
    return DENSE if gemm.index is None else GATHERED


@dataclass(frozen=True, slots=True)
class _Axes:
    """The axes of a block; ``rows`` are those of one of the first weights: 2I, or I."""

    tokens: Axis
    branch: Axis
    hidden: Axis
    rows: Axis
    inner: Axis
    out: Axis


def read_branches(ups: Sequence[BranchGemm], down: BranchGemm, memo: Memo, *, weight_on_input: bool) -> Block:
    """Read the block whose first GEMMs are ``ups``, one for gate and up or one for each, and whose last is ``down``.

    Raises:
        NoMatch: something is not as in a mixture-of-experts block.
    """
    with stage(0.3):
        branches = _branches(ups, down)
    with stage(0.5):
        w13, k_first = _packed(ups, memo)
        w2, down_k_first = _packed([down], memo)
        check_fit(w13, w2, down.node)
    with stage(0.4):
        given = [_read_input(up.rows, w13.shape[2], branches, weighted=weight_on_input) for up in ups]
        hidden = _same_input(given, ups)
        sizes = _axes(hidden, branches, w13.shape[1] // len(ups), w2)
        first = [
            _product(up, one.layout, sizes.rows, sizes.hidden, sizes, k_first)
            for up, one in zip(ups, given, strict=True)
        ]
    with stage(0.6):
        start = Way(down.rows, (), branches, given[0].routing)
        activation, inner = _between(first, down, start, sizes, memo)
    with stage(0.7):
        last = _product(down, inner.layout, sizes.out, sizes.inner, sizes, down_k_first)
        if inner.routing is not start.routing and last.bias is not None:
            raise NoMatch("{} adds a bias that carries no routing weights", last.node.name, node=last.node)
        way = Way(last.node, last.layout, branches, inner.routing)
        combine = combine_branches(way, sizes.tokens, sizes.out)
        if weight_on_input:
            _check_idle_experts(first, last, branches)
    steps: list[Iterable[fx.Node]] = [inner.nodes, combine.nodes, *(one.nodes for one in given)]
    for gemm, biased in zip((*ups, down), (*first, last), strict=True):
        steps += [gemm.nodes, biased.nodes, trail(gemm.rows), [node for node, _ in onward(biased.node, biased.layout)]]
    return Block(
        form=_form(down),
        hidden=hidden,
        ids=combine.routing.ids,
        weights=combine.routing.weights,
        weights_dtype=combine.routing.dtype,
        top_k=_top_k(combine.routing.ids),
        w13=w13,
        w2=w2,
        w13_bias=join_sources([one.bias for one in first]),
        w2_bias=last.bias,
        k_first=k_first,
        activation=activation.spec,
        order=activation.order,
        scalars=dict(activation.scalars),
        output=combine.output,
        feeds={
            hidden: Feed(Operand.HIDDEN),
            **combine.routing.feeds,
            **_weight_feeds(ups, first, k_first, Operand.W13, Operand.W13_BIAS),
            **_weight_feeds([down], [last], down_k_first, Operand.W2, Operand.W2_BIAS),
            **{node: Feed(operand) for operand, node in activation.scalars.items()},
        },
        explained=frozenset().union(*steps),
        weight_on_input=weight_on_input,
        branches=sizes.branch.name,
    )


def _branches(ups: Sequence[BranchGemm], down: BranchGemm) -> Branches:
    """What tokens run over, which must be the same in every GEMM."""
    if len(ups) > 2:
        names = ", ".join(up.node.name for up in ups)
        raise NoMatch("{} reads rows of several expert GEMMs: {}", down.node.name, names, node=down.node)
    experts = shape(down.weight)[0]
    if not isinstance(experts, int):
        raise NoMatch("{} has no constant number of experts", down.weight.name, node=down.node)
    found = [None if gemm.index is None else read_ids(gemm.index, experts)[0] for gemm in (*ups, down)]
    if any(ids is not found[0] for ids in found):
        raise NoMatch("{} runs other experts than {}", down.node.name, ups[0].node.name, node=down.node)
    return Branches(found[0], experts)


def _top_k(ids: fx.Node) -> int:
    sizes = shape(ids)
    top_k = sizes[-1] if len(sizes) > 1 else 1
    assert isinstance(top_k, int), "checked where the ids are read"
    return top_k


def _axes(hidden: fx.Node, branches: Branches, rows: int, w2: PackedWeight) -> _Axes:
    tokens = axis_over("T", shape(hidden)[:-1])
    experts, out, inner = w2.shape
    branch = Axis("E", experts) if branches.ids is None else Axis("k", _top_k(branches.ids))
    return _Axes(tokens, branch, Axis("H", out), Axis("N", rows), Axis("I", inner), Axis("O", out))


def _packed(gemms: Sequence[BranchGemm], memo: Memo) -> tuple[PackedWeight, bool]:
    """The packed weight of one GEMM, or of gate and up, and whether it is stored ``[E, K, N]``."""
    found = [identify(gemm.weight, memo) for gemm in gemms]
    if any(transposed != found[0][1] for _, transposed in found):
        raise NoMatch("gate and up are stored in different orders", node=gemms[-1].node)
    return join_halves([packed for packed, _ in found]), found[0][1]


def _read_input(rows: fx.Node, width: int, branches: Branches, *, weighted: bool) -> Way:
    """The hidden states that ``rows`` repeat, and the layout of ``rows``; routing weights may be in."""
    if not weighted:
        return _hidden(rows, width, branches)
    steps = trail(rows, casts=True)
    product = steps[0]
    if not is_call(product, aten.mul.Tensor):
        raise NoMatch("rows of the first GEMM are no hidden states times weights but {}", product.name, node=product)
    left, right = inputs(product, "self", "other")
    columns = [isinstance(side, fx.Node) and same(shape(side)[-1], width) for side in (left, right)]
    if sum(columns) != 1:
        raise NoMatch("{} is no product of hidden states and weights", product.name, node=product)
    states, factor = (left, right) if columns[0] else (right, left)
    given = _hidden(unwidened(states), width, branches)
    if not isinstance(factor, fx.Node) or dtype(given.node) is not dtype(rows):
        raise NoMatch("{} changes the dtype of {}", rows.name, given.node.name, node=rows)
    way = weigh(given, factor)
    wide = {arg for arg in product.all_input_nodes if arg is not factor}
    return replace(way, layout=along(way.layout, steps), nodes=way.nodes | wide | {*steps})


def _hidden(rows: fx.Node, width: int, branches: Branches) -> Way:
    steps = trail(rows)
    rightly_wide = [node for node in steps if shape(node) and same(shape(node)[-1], width)]
    hidden = next((node for node in rightly_wide if len(shape(node)) == 2), rightly_wide[0] if rightly_wide else None)
    if hidden is None:
        raise NoMatch("{} holds no hidden states of width {}", rows.name, width, node=rows)
    steps = steps[steps.index(hidden) :]
    layout = laid_out(shape(hidden), ("T", len(shape(hidden)) - 1), ("H", 1))
    return Way(hidden, along(layout, steps), branches, nodes=frozenset(steps[1:]))


def _product(gemm: BranchGemm, rows: Layout, row: Axis, column: Axis, sizes: _Axes, k_first: bool) -> Biased:
    """The result of a GEMM, which must sum over columns and keep tokens, branches and rows apart."""
    layout, summed = gemm.product(rows, gemm.weight_layout(row, column, k_first=k_first))
    kept = [axis for axis in (sizes.tokens, sizes.branch) if axis.name not in summed]
    if column.name not in summed | ({column.name} if same(column.size, 1) else set()) or sizes.tokens not in kept:
        raise NoMatch("{} does not sum over the columns of its weights", gemm.node.name, node=gemm.node)
    if not holds_only(layout, *kept, row):
        raise NoMatch("{} does not run every token over its experts", gemm.node.name, node=gemm.node)
    summed_up = sizes.branch not in kept and not same(sizes.branch.size, 1)
    return Biased(gemm.node, layout, None, frozenset()) if summed_up else with_bias(gemm, layout, row)


def _facing(biased: Biased, sizes: _Axes) -> tuple[fx.Node, Layout, int]:
    """What the activation reads of a product: best with its columns last, counted from the last dimension."""
    places = [
        (node, layout, column - len(layout))
        for node, layout in onward(biased.node, biased.layout)
        if (column := columns_of(layout, sizes.rows)) is not None
    ]
    if not places:
        raise NoMatch("the columns of {} stand in no dimension of their own", biased.node.name, node=biased.node)
    return next((place for place in reversed(places) if place[2] == -1), places[-1])


def _same_input(given: Sequence[Way], ups: Sequence[BranchGemm]) -> fx.Node:
    """The hidden states that go into every first GEMM, all with the same weights, if with any."""
    states, routing = given[0].node, given[0].routing
    for other in given[1:]:
        weights = None if other.routing is None else other.routing.weights
        if other.node is not states or weights != (None if routing is None else routing.weights):
            raise NoMatch("{} and {} read other rows", ups[0].node.name, ups[-1].node.name, node=ups[-1].node)
    return states


def _between(
    first: Sequence[Biased], down: BranchGemm, start: Way, sizes: _Axes, memo: Memo
) -> tuple[IdentifiedActivation, Way]:
    """The activation, and the way of its result to the down GEMM; routing weights may multiply it there.

    Raises:
        NoMatch: it is no known activation, nor one times routing weights.
    """
    faced = [_facing(one, sizes) for one in first]
    outs, (layout, column) = [out for out, _, _ in faced], faced[0][1:]
    if any(not _alike(layout, other) or column != place for _, other, place in faced):
        raise NoMatch("gate and up lie in different orders", node=outs[-1])
    inner, steps = sizes.inner.size, trail(down.rows)
    assert isinstance(inner, int), "the weights say so"

    def activated(result: fx.Node) -> tuple[IdentifiedActivation, Way]:
        activation = identify_in_columns(result, outs, column, inner, memo)
        between = frozenset(cone([result], [*outs, *activation.scalars.values()]))
        return activation, replace(start, node=result, layout=_of_result(layout, column, sizes, result), nodes=between)

    end = steps[0]
    product = arguments(end)["a"] if is_call(end, CAST) else end
    sides = inputs(product, "self", "other") if is_call(product, aten.mul.Tensor) and start.routing is None else []
    if not all(isinstance(side, fx.Node) for side in sides):
        sides = []
    for result, factor in zip(sides, sides[::-1], strict=True):
        with contextlib.suppress(NoMatch):
            read_routing(factor, start.branches)  # before anything is run
            activation, way = activated(result)
            way = weigh(way, factor)
            return activation, replace(
                way, layout=along(way.layout, steps), nodes=way.nodes | {product, *steps, *trail(factor)}
            )
    activation, way = activated(steps[0])
    return activation, replace(way, layout=along(way.layout, steps), nodes=way.nodes | {*steps})


def _alike(left: Layout, right: Layout) -> bool:
    return len(left) == len(right) and all(unified(a, b) is not None for a, b in zip(left, right, strict=True))


def _of_result(layout: Layout, column: int, sizes: _Axes, result: fx.Node) -> Layout:
    """The layout of an activation's result, which stands as its input does."""
    place = len(layout) + column
    dims: list[Dimension] = [(sizes.inner,) if at == place else dim for at, dim in enumerate(layout)]
    return regrouped(result, axes(tuple(dims)), shape(result))


def _check_idle_experts(first: Sequence[Biased], last: Biased, branches: Branches) -> None:
    """Where all experts run, those that a token has not chosen get zeros, of which they must make zeros."""
    biased = next((one for one in (*first, last) if one.bias is not None), None)
    if biased is not None and branches.ids is None:
        raise NoMatch("{} adds a bias also to experts that no token has chosen", biased.node.name, node=biased.node)


def _weight_feeds(
    gemms: Sequence[BranchGemm], products: Sequence[Biased], k_first: bool, weight: Operand, bias: Operand
) -> dict[fx.Node, Feed]:
    feeds: dict[fx.Node, Feed] = {}
    for half, (gemm, biased) in enumerate(zip(gemms, products, strict=True)):
        part = half if len(gemms) == 2 else None
        feeds[gemm.weight] = Feed(weight, half=part, k_first=k_first)
        if biased.bias is not None:
            feeds[biased.bias] = Feed(bias, half=part)
    return feeds
