"""The closed catalogue of routers, filled with the numbers of a graph and compared with its values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import isfinite, prod
from typing import Literal

import torch
from torch import fx

from ..matching import NoMatch
from ..spec import RUNTIME, RouterSpec, Scoring
from .probing import shape_hint
from .router_formulas import scores_of, weights_of, without_null
from .router_piece import RouterDraw, RouterPiece
from .steps import close, name_of, numbers

_SCORING_STEPS = {"exp", "sigmoid", "_softmax", "softmax", "_log_softmax", "softplus", "log1p", "tanh", "logsumexp"}
_GROUP_SCORES: tuple[Literal["top2_sum", "max"], ...] = ("top2_sum", "max")
_SCORINGS = (Scoring.SOFTMAX, Scoring.SIGMOID, Scoring.SQRT_SOFTPLUS)
_MIN_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class FoundRouter:
    """A router of the catalogue; a RUNTIME scaling factor is ``literal`` times every scalar input."""

    spec: RouterSpec
    literal: float


def find_router(piece: RouterPiece, draws: Sequence[RouterDraw], explains: Callable[[RouterSpec], None]) -> FoundRouter:
    """The first router that agrees with every draw and passes ``explains``.

    Raises:
        NoMatch: there is none; as ``explains`` put it where one agrees.
    """
    miss = NoMatch("the router at {} is none that is known", piece.ids, node=piece.ids, progress=0.5)
    for spec in _selections(piece):
        if not all(_selects(spec, draw, piece.top_k) for draw in draws):
            continue
        for found in _weightings(spec, piece, draws[0]):
            if all(_weighs(found, draw) for draw in draws):
                try:
                    explains(found.spec)
                except NoMatch as unexplained:
                    miss = unexplained
                else:
                    return found
    raise miss


def _selections(piece: RouterPiece) -> Iterator[RouterSpec]:
    """Every way to choose experts that the piece's numbers can fill; weights are left open."""
    if piece.ids_given:
        for scoring in _SCORINGS[: None if piece.num_classes == piece.num_experts else 0]:
            yield RouterSpec(scoring, ids_given=True)
        return
    more, has_bias = piece.num_classes - piece.num_experts, piece.bias is not None
    if not any(name_of(node) in _SCORING_STEPS for node in piece.choosing):
        for scoring in _SCORINGS[: None if not more else 0]:
            yield RouterSpec(scoring, topk_before_scoring=True, has_bias=has_bias)
        yield from _sparse(piece) if not more and not has_bias else ()
    for scoring in _SCORINGS:
        plain = RouterSpec(scoring, has_bias=has_bias)
        if more:
            bias = shape_hint(piece.nodes[piece.bias]) if piece.bias is not None else None
            if bias is None or prod(bias) == piece.num_experts:
                yield replace(plain, num_shared_experts=more)
            if bias is None or prod(bias) == piece.num_classes:
                yield replace(plain, num_null_experts=more)
            continue
        yield plain
        for groups, kept, score, fill in _groups(piece):
            yield replace(plain, num_groups=groups, topk_groups=kept, group_score=score, group_fill=fill)


def _sparse(piece: RouterPiece) -> Iterator[RouterSpec]:
    compared = [node for node in piece.steps if name_of(node) in ("gt", "ge", "lt", "le")]
    for threshold in sorted({number for node in compared for number in numbers(node) if number > 0}):
        yield RouterSpec(Scoring.SPARSEMIXER, sparsity_threshold=threshold)


def _groups(piece: RouterPiece) -> Iterator[tuple[int, int, Literal["top2_sum", "max"], float]]:
    shapes = [shape_hint(node) or () for node in piece.nodes]
    counts = {s[-2] for s in shapes if len(s) > 1 and 1 < s[-2] < piece.num_experts == s[-2] * s[-1]}
    kept = {arg for node in piece.steps if name_of(node) == "topk" for arg in node.args[1:2] if isinstance(arg, int)}
    kept |= {1} if any(name_of(node) in ("argmax", "max") for node in piece.steps) else set()
    fills = [*(number for number in piece.constants if number < 0), 0.0]
    for count, topk_groups, score, fill in product(sorted(counts), sorted(kept), _GROUP_SCORES, fills):
        if topk_groups < count:
            yield count, topk_groups, score, fill


def _selects(spec: RouterSpec, draw: RouterDraw, top_k: int) -> bool:
    """Whether the draw's experts are a best choice. Equal scores may be chosen among in any order.

    Of masked groups, which all score alike, it must be the same experts: any number of groups would be as good.
    """
    if spec.ids_given:
        return True
    _, selection = scores_of(spec, draw.logits, draw.bias)
    best, order = selection.topk(top_k, dim=-1)
    if spec.num_null_experts:
        ids, _ = without_null(spec, order, draw.weights, selection.shape[-1])
        return torch.equal(ids.sort(-1).values, draw.ids.sort(-1).values)
    distinct = bool((draw.ids.sort(-1).values.diff(dim=-1) != 0).all())
    chosen = selection.gather(-1, draw.ids).sort(-1, descending=True).values
    if spec.num_groups > 1:
        masked = (best == spec.group_fill).any(-1)
        if not torch.equal(order[masked].sort(-1).values, draw.ids[masked].sort(-1).values):
            return False
    return distinct and bool(((best == chosen) | ((best - chosen).abs() <= 1e-12 * best.abs())).all())


def _weightings(spec: RouterSpec, piece: RouterPiece, draw: RouterDraw) -> Iterator[FoundRouter]:
    """Every way to weigh the chosen experts whose scaling the graph explains."""
    finite = [number for number in piece.constants if number and isfinite(number)]
    literals = [1.0, *finite, *(1 / number for number in finite)]
    spec = replace(spec, has_expert_scale=piece.expert_scale is not None)
    options = [spec] if not spec.num_shared_experts else []
    if spec.scoring is not Scoring.SPARSEMIXER:
        options += [replace(spec, renormalize=True, renormalize_min=floor) for floor in piece.floors]
        options += [replace(spec, renormalize=True, renormalize_eps=eps) for eps in (*piece.tiny, 0.0)]
    for option in options:
        base = _unscaled(option, draw) * draw.scale
        ratio = float((draw.weights / base)[base != 0].median())
        for literal in literals:
            if abs(ratio - literal) <= 1e-6 * abs(literal):
                factor = RUNTIME if draw.scalars else float(literal)
                yield FoundRouter(replace(option, scaling_factor=factor), float(literal))


def _weighs(found: FoundRouter, draw: RouterDraw) -> bool:
    return close(draw.weights, _unscaled(found.spec, draw) * (found.literal * draw.scale), _MIN_TOLERANCE)


def _unscaled(spec: RouterSpec, draw: RouterDraw) -> torch.Tensor:
    """Weights ``[T, k]`` of the draw's experts, before the scaling factor."""
    scores, selection = scores_of(spec, draw.logits, draw.bias)
    if spec.num_null_experts:
        chosen = selection.topk(draw.ids.shape[-1], dim=-1).indices
        ids, weights = without_null(spec, chosen, weights_of(spec, scores, chosen), selection.shape[-1])
        order, place = ids.argsort(dim=-1, stable=True), draw.ids.argsort(dim=-1, stable=True)
        return torch.empty_like(weights).scatter(-1, place, weights.gather(-1, order))
    weights = weights_of(spec, scores, draw.ids)
    return weights if draw.expert_scale is None else weights * draw.expert_scale[draw.ids]


def is_scored(node: fx.Node) -> bool:
    """Whether ``node`` may be a step of scoring."""
    return name_of(node) in _SCORING_STEPS
