"""Recognise the router: how expert ids and weights come from logits, by what it computes.

The graph is cut at the logits and run in float64 on random ones; what agrees with a router of the catalogue must
then explain every step that selects. Whatever is not found stays in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, prod

import torch
from torch import fx

from ..matching import Assembled, NoMatch, Source
from ..spec import Operand, RouterSpec, Scoring
from .probing import cone, dtype_of, evaluate, isolated, shape_hint
from .router_catalogue import FoundRouter, find_router, is_scored
from .router_formulas import router_reference, score, weights_of
from .router_piece import MAX_NODES, PRODUCTS, RouterDraw, RouterPiece, cut, draws, is_float
from .signature import Memo, signature
from .steps import CLAMPS, LAYOUT, SELECTING, close, name_of, numbers
from .weights import Bound

__all__ = ["IdentifiedRouter", "identify_router", "router_reference"]

_SOFTPLUS_THRESHOLD = 20.0
_MOVES = LAYOUT - {"_to_copy", "convert_element_type", "fma"} | {"", "topk", "sort", "gather", "index", "amax", "max"}
"""Steps whose numbers are some of those they get; inputs have no name."""
_MAX_MORE = 16
"""Columns that logits may have beyond the experts'."""


@dataclass(frozen=True, slots=True)
class IdentifiedRouter:
    """A router and where its inputs come from: ROUTER_LOGITS, and what else its spec has.

    The logits are ``[T, C]``, or have these elements; the vectors ``[E]`` likewise.
    """

    spec: RouterSpec
    operands: Mapping[Operand, Source]


@dataclass(frozen=True, slots=True)
class _Found:
    router: FoundRouter
    dtype: torch.dtype


def identify_router(
    ids: fx.Node, weights: fx.Node, num_experts: int, top_k: int, memo: Memo | None = None
) -> IdentifiedRouter:
    """The router that computes ``ids`` and ``weights``.

    Args:
        ids: integers ``[..., k]``.
        weights: floats of as many elements, in the same order; or scores ``[T, E]``, of which those at the ids count.
        num_experts, top_k: E and k.
        memo: remembers what equal routers are.

    Raises:
        NoMatch: it is none of the catalogue; its ids and weights then have to be taken as given.
    """
    miss: NoMatch | None = None
    for piece in _pieces(ids, weights, num_experts, top_k):
        if isinstance(piece, NoMatch):
            miss = miss or piece
            continue
        key = ("router", num_experts, top_k, signature(piece.nodes, inputs=len(piece.inputs)),
               piece.nodes.index(ids), piece.nodes.index(weights))  # fmt: skip
        try:
            found = _identify(piece) if memo is None else memo.get(key, partial(_identify, piece))
        except NoMatch as error:
            if miss is None or error.progress > miss.progress:
                miss = error
            continue
        return IdentifiedRouter(replace(found.router.spec, dtype=found.dtype), _operands(piece, found.router.literal))
    raise miss or NoMatch("{} and {} do not come from logits of {} experts", ids, weights, num_experts, node=ids)


def _pieces(ids: fx.Node, weights: fx.Node, num_experts: int, top_k: int) -> Iterator[RouterPiece | NoMatch]:
    """Every cut that bounds a router, or why one does not; plain logits first, then those with more columns."""
    tokens = prod(shape_hint(ids) or ()) // top_k
    near = _near([ids, weights])
    products = [node for node in near if name_of(node) in PRODUCTS]
    behind = cone([ids, weights], products) if len(near) <= MAX_NODES else list(reversed(near))
    floats = [node for node in (*products, *behind) if is_float(node) and shape_hint(node)]
    sources = _near([ids])
    ids_given = len(sources) <= MAX_NODES and not any(map(is_float, sources))
    for more in range(_MAX_MORE):
        width = num_experts + more
        for logits in floats:
            shape = shape_hint(logits) or ()
            if shape[-1] != width or prod(shape) != tokens * width:
                continue
            try:
                yield cut(logits, ids, weights, products, num_experts, top_k, ids_given=ids_given)
            except NoMatch as miss:
                yield miss


def _near(outputs: Sequence[fx.Node]) -> list[fx.Node]:
    """What ``outputs`` come from, up to products and not much further than a router is long."""
    near = list(outputs)
    seen = set(near)
    for node in near:
        if len(near) > MAX_NODES:
            break
        if name_of(node) not in PRODUCTS:
            found = [source for source in dict.fromkeys(node.all_input_nodes) if source not in seen]
            seen.update(found)
            near += found
    return near


def _identify(piece: RouterPiece) -> _Found:
    with isolated():
        tried = list(draws(piece))
        found = find_router(piece, tried, partial(_audit, piece))
        dtypes = [_scoring_dtype(piece, found.spec, tried[0]), *_rounded_to(piece, tried[0])]
        return _Found(found, max(dtypes, key=_eps))


def _operands(piece: RouterPiece, literal: float) -> dict[Operand, Source]:
    operands: dict[Operand, Source] = {Operand.ROUTER_LOGITS: piece.logits}
    if piece.bias is not None:
        operands[Operand.ROUTER_BIAS] = piece.nodes[piece.bias]
    if piece.expert_scale is not None:
        operands[Operand.ROUTER_EXPERT_SCALE] = piece.nodes[piece.expert_scale]
    scalars = tuple(piece.nodes[place] for place in piece.scalars)
    if len(scalars) == 1 and literal == 1 and shape_hint(scalars[0]) == ():
        operands[Operand.ROUTER_SCALE] = scalars[0]
    elif scalars:
        operands[Operand.ROUTER_SCALE] = Assembled(Bound(_scaled_product, (literal,)), scalars)
    return operands


def _scaled_product(literal: float, *factors: torch.Tensor) -> torch.Tensor:
    """``literal`` times the only element of each factor, 0-d in float32."""
    result = factors[0].reshape(()).float() * literal
    for factor in factors[1:]:
        result = result * factor.reshape(())
    return result


def _audit(piece: RouterPiece, spec: RouterSpec) -> None:
    """Every step that selects or cuts floats must be one that the accepted router makes.

    Raises:
        NoMatch: one is not.
    """
    known = {0.0, 1.0, spec.group_fill}
    allowed = {"where", "masked_fill", "eq", "ne", "lt", "le", "gt", "ge"}
    if spec.scoring is Scoring.SQRT_SOFTPLUS:
        known.add(_SOFTPLUS_THRESHOLD)
        allowed.add("softplus")
    if spec.scoring is Scoring.SPARSEMIXER:
        known.add(spec.sparsity_threshold)
        allowed |= CLAMPS | {"abs"}
    if spec.renormalize_min:
        known.add(spec.renormalize_min)
        allowed |= CLAMPS
    if spec.num_shared_experts:  # log-sigmoids and the logarithm of their sum, which look for infinities
        known.add(inf)
        allowed |= {"minimum", "abs"}
    for node in piece.steps:
        if name_of(node) not in SELECTING or not any(map(is_float, node.all_input_nodes)):
            continue
        mentioned: list[float] = [] if name_of(node) == "softplus" else numbers(node)
        for source in node.all_input_nodes:
            fixed = not source.all_input_nodes and source not in piece.nodes[:1] and not _is_input(piece, source)
            mentioned += numbers(source) if fixed else []
        if name_of(node) not in allowed or not known.issuperset(mentioned):
            raise NoMatch("{} ({}) is no step of {}", node, node.target, spec, node=node, progress=0.6)


def _is_input(piece: RouterPiece, node: fx.Node) -> bool:
    places = (piece.bias, piece.expert_scale, *piece.scalars)
    return any(place is not None and piece.nodes[place] is node for place in places)


def _scoring_dtype(piece: RouterPiece, spec: RouterSpec, draw: RouterDraw) -> torch.dtype:
    """The dtype that scores pass through on their way to selection, or are made in after it."""
    if spec.scoring is Scoring.SPARSEMIXER:
        steps = [node for node in piece.steps if is_scored(node) and is_float(node)]
        return dtype_of(steps[-1]) or torch.float32 if steps else torch.float32
    late = spec.topk_before_scoring
    if late:
        scores = weights_of(replace(spec, renormalize=False), draw.logits, draw.ids)
    else:
        scores = score(spec.scoring, draw.logits)
    alike = [node for node in (piece.steps if late or spec.ids_given else piece.choosing) if is_float(node)]
    dtypes = [
        dtype_of(node) or torch.float32
        for node, value in zip(alike, evaluate(alike, draw.feeds), strict=True)
        if value.numel() == scores.numel() and close(value.reshape(scores.shape), scores)
    ]
    if not dtypes:
        return torch.float32
    return dtypes[0] if late else max(dtypes, key=_eps)


def _rounded_to(piece: RouterPiece, draw: RouterDraw) -> Iterator[torch.dtype]:
    """The dtypes below float32 that some step between logits and finished weights rounds to."""
    low = [
        node
        for node in piece.steps
        if is_float(node) and _precision(node) > _eps(torch.float32) and name_of(node) not in _MOVES
    ]
    final, *values = evaluate([piece.weights, *low], draw.feeds)
    for node, value in zip(low, values, strict=True):
        finished = value.numel() == final.numel() and close(value.reshape(final.shape), final)
        if not finished or _precision(node) > _precision(piece.weights):
            yield dtype_of(node) or torch.float32


def _precision(node: fx.Node) -> float:
    return _eps(dtype_of(node) or torch.float32)


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps
