"""Blocks over T*k rows, one a slot: the expert GEMMs run them sorted by expert, or each with its gathered weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx

from ..matching import Assembled, NoMatch, PackedWeight, Source
from ..spec import Operand
from .activation import identify_activation
from .batched_mm import NAME as BATCHED_MM
from .batched_mm import read_batched_mm
from .block import Block, Candidate, Feed
from .combine import Combine, read_combine
from .dequantize import identify
from .gemm import ExpertGemm, Projection, behind, read_projection
from .graph_tools import CAST, aten, dtype, inputs, is_call, numel, same, same_shape, shape, source, stage, unwidened
from .grouped_mm import NAME as GROUPED_MM
from .grouped_mm import operands as grouped_operands
from .grouped_mm import read_grouped_mm
from .masks import unmasked
from .near_misses import Misses
from .probing import cone
from .rows import RowOrder, is_choice, unbounded
from .scores import in_dtype
from .signature import Memo
from .weights import Bound, check_fit, join_halves, join_sources


def candidates(gemms: Sequence[fx.Node], misses: Misses) -> Iterator[Candidate]:
    """Every down GEMM with the GEMMs of rows that it reads from, first with weights on what comes out."""
    read = _read_gemms(gemms, misses)
    for down in read.values():
        ups = [read[node] for node in behind(down.node, down.rows, read)]
        if ups:
            nodes = tuple(gemm.node for gemm in (*ups, down))
            for on_input in (False, True):
                yield Candidate(down.form, nodes, partial(read_routed_rows, ups, down, weight_on_input=on_input))


def _read_gemms(nodes: Sequence[fx.Node], misses: Misses) -> dict[fx.Node, ExpertGemm]:
    gemms: dict[fx.Node, ExpertGemm] = {}
    for node in nodes:
        grouped = grouped_operands(node) is not None
        if not grouped and not is_call(node, aten.bmm.default):
            continue
        form = GROUPED_MM if grouped else BATCHED_MM
        try:
            gemms[node] = read_grouped_mm(node) if grouped else read_batched_mm(node)
            misses.keep(
                form, NoMatch("no second expert GEMM reads what {} gives", node.name, node=node, progress=0.25), node
            )
        except NoMatch as miss:
            misses.keep(form, miss, node)
    return gemms


def read_routed_rows(
    ups: Sequence[ExpertGemm], down: ExpertGemm, memo: Memo, *, weight_on_input: bool = False
) -> Block:
    """Read the block whose first GEMMs are ``ups``, one for gate and up or one for each, and whose last is ``down``.

    Raises:
        NoMatch: something is not as in a mixture-of-experts block.
    """
    first = ups[0]
    with stage(0.3):
        for up in ups:
            if (up.form, up.order) != (down.form, down.order):
                raise NoMatch("{} and {} do not run the same rows", up.node.name, down.node.name, node=down.node)
        if len(ups) > 2:
            names = ", ".join(up.node.name for up in ups)
            raise NoMatch("{} reads rows of several expert GEMMs: {}", down.node.name, names, node=down.node)
        ids, experts = first.order.ids, first.sizes[0]
        top_k = _top_k(ids, experts)
    with stage(0.4):
        given = _gathered(ups, top_k, weighted=weight_on_input)
        projections, last = [read_projection(up) for up in ups], read_projection(down)
    with stage(0.5):
        w13 = join_halves([_packed(up, memo) for up in ups])
        w2 = _packed(down, memo)
        check_fit(w13, w2, first.node)
        _check_tokens(given.hidden, first, w2.shape[1], top_k)
    with stage(0.6):
        result = source(down.rows)
        activation = identify_activation(result, tuple(p.out for p in projections), w2.shape[2], memo)
        between = cone([down.rows], [*(p.out for p in projections), *activation.scalars.values()])
    with stage(0.7):
        combine = read_combine(last.out, down.order, top_k, w2.shape[0], w2.shape[1], given.weights)
    masked = [projection.masked for projection in (*projections, last)]
    steps = [given.nodes, between, combine.nodes, *(p.nodes for p in (*projections, last))]
    return Block(
        form=first.form,
        hidden=given.hidden,
        ids=ids,
        weights=_as_multiplied(combine),
        weights_dtype=combine.weights_dtype,
        top_k=top_k,
        w13=w13,
        w2=w2,
        w13_bias=join_sources([p.bias for p in projections]),
        w2_bias=last.bias,
        k_first=first.k_first,
        activation=activation.spec,
        order=activation.order,
        scalars=dict(activation.scalars),
        output=combine.output,
        feeds={
            given.hidden: Feed(Operand.HIDDEN),
            ids: Feed(Operand.TOPK_IDS),
            combine.weights: Feed(Operand.TOPK_WEIGHTS),
            **_weight_feeds(projections, last),
            **{node: Feed(operand) for operand, node in activation.scalars.items()},
        },
        explained=frozenset().union(*steps),
        weight_on_input=weight_on_input,
        masked=not is_choice(ids, experts) and any((given.masked, combine.masked, *masked)),
    )


def _as_multiplied(combine: Combine) -> Source:
    """The routing weights as a fused op takes them: in the dtype in which they multiply."""
    if dtype(combine.weights) is combine.weights_dtype:
        return combine.weights
    return Assembled(Bound(in_dtype, (combine.weights_dtype,)), (combine.weights,))


def _top_k(ids: fx.Node, num_experts: object) -> int:
    sizes = shape(unbounded(ids, num_experts))
    if len(sizes) < 2 or not isinstance(sizes[-1], int) or dtype(ids) not in (torch.int64, torch.int32):
        raise NoMatch("expert ids {} are not integers [T, k] with a constant k", ids.name, node=ids)
    return sizes[-1]


@dataclass(frozen=True, slots=True)
class _Given:
    """What the first GEMMs read: hidden states ``[T, H]``, the weights in them, and the steps to the rows."""

    hidden: fx.Node
    weights: fx.Node | None
    nodes: list[fx.Node]
    masked: bool


def _gathered(ups: Sequence[ExpertGemm], top_k: int, *, weighted: bool) -> _Given:
    found: list[tuple[fx.Node, fx.Node | None]] = []
    masked = False
    for up in ups:
        rows = unmasked(source(up.rows), up.order, up.sizes[0])
        masked |= rows is not None
        states, weights = _unweighted(rows or up.rows, up.order) if weighted else (rows or up.rows, None)
        hidden = up.order.per_token(states, top_k)
        if weighted and dtype(hidden) is not dtype(up.rows):
            raise NoMatch("{} changes the dtype of {}", up.rows.name, hidden.name, node=up.rows)
        found.append((hidden, weights))
    hidden, weights = found[0]
    if any(source(other) is not source(hidden) or others is not weights for other, others in found):
        raise NoMatch("{} and {} read rows of other tokens", ups[0].node.name, ups[-1].node.name, node=ups[-1].node)
    stops = [hidden, *(node for up in ups for node in up.order.nodes), *([] if weights is None else [weights])]
    return _Given(hidden, weights, cone([up.rows for up in ups], stops), masked)


def _unweighted(rows: fx.Node, order: RowOrder) -> tuple[fx.Node, fx.Node]:
    """Gathered hidden states and the routing weights that they are multiplied with."""
    product = source(rows)
    if is_call(product, CAST):
        product = source(inputs(product, "a")[0])
    if not is_call(product, aten.mul.Tensor):
        raise NoMatch("{} are no hidden states times routing weights", rows.name, node=rows)
    left, right = inputs(product, "self", "other")
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        raise NoMatch("{} scales rows by a constant", product.name, node=product)
    states, factor = (right, left) if same(numel(left), numel(order.ids)) else (left, right)
    weights = order.per_slot(source(factor))
    one_a_row = same_shape(factor, (*shape(states)[:-1], 1)) and same(numel(weights), numel(order.ids))
    if not one_a_row or not dtype(weights).is_floating_point:
        raise NoMatch("{} is not one weight a row", factor.name, node=product)
    return unwidened(states), weights


def _packed(gemm: ExpertGemm, memo: Memo) -> PackedWeight:
    """The packed weight of a GEMM, whose blocks must lie along the axis that the GEMM sums over."""
    packed, transposed = identify(gemm.weight, memo)
    if transposed != gemm.k_first:
        raise NoMatch("{} sums over an axis that its scales do not run along", gemm.node.name, node=gemm.node)
    return packed


def _check_tokens(hidden: fx.Node, up: ExpertGemm, width: int, top_k: int) -> None:
    sizes = shape(hidden)
    if not same(sizes[-1], width) or not same(numel(hidden) * top_k, numel(up.order.ids) * width):
        raise NoMatch("{} is not one row of {} for every token", hidden.name, width, node=hidden)


def _weight_feeds(ups: Sequence[Projection], down: Projection) -> dict[fx.Node, Feed]:
    feeds = {down.gemm.weight: Feed(Operand.W2, k_first=down.gemm.k_first)}
    for half, up in enumerate(ups):
        part = half if len(ups) == 2 else None
        feeds[up.gemm.weight] = Feed(Operand.W13, half=part, k_first=up.gemm.k_first)
        if up.bias is not None:
            feeds[up.bias] = Feed(Operand.W13_BIAS, half=part)
    if down.bias is not None:
        feeds[down.bias] = Feed(Operand.W2_BIAS)
    return feeds
