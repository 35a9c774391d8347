"""Recognise the router: how expert ids and weights come from logits, by what it computes.

The graph is cut at the logits and run in float64 on random ones, in regimes that tell near twins
apart: biases that make every score negative show what masked groups are filled with, scores that
nearly vanish show what is added to their sum. Whatever is not found stays in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import isfinite, log, prod
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import fx

from ..matching import NoMatch
from ..spec import RUNTIME, RouterSpec, Scoring
from .probing import cone, constant_value, dtype_of, evaluate, isolated, shape_hint
from .resizing import op_name, probe_shapes
from .signature import Memo, signature
from .steps import SELECTING, close, numbers

_MAX_NODES = 400
_ROWS = 48
_MIN_TOKENS = 16
_SCORING_STEPS = {"exp", "sigmoid", "_softmax", "softmax", "_log_softmax", "softplus", "log1p", "tanh", "logsumexp"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "einsum", "_grouped_mm", "_scaled_mm"}
"""The logits come out of one of these; nothing before them is part of a router."""
_SOFTPLUS_THRESHOLD = 20.0
_MIN_TOLERANCE = 1e-6
_GROUP_SCORES: tuple[Literal["top2_sum", "max"], ...] = ("top2_sum", "max")


@dataclass(frozen=True, slots=True)
class IdentifiedRouter:
    """A router and its inputs.

    ``logits`` is ``[T, E]`` (or has these elements), ``bias`` ``[E]``. ``scalars`` holds the 0-d input
    "scaling_factor" where the spec's is RUNTIME.
    """

    spec: RouterSpec
    logits: fx.Node
    bias: fx.Node | None
    scalars: Mapping[str, fx.Node]


@dataclass(frozen=True, slots=True)
class _Piece:
    """The graph between logits and outputs, in topological order; the logits first. Inputs by place."""

    nodes: tuple[fx.Node, ...]
    ids: fx.Node
    weights: fx.Node
    num_experts: int
    top_k: int
    bias: int | None
    scalars: tuple[int, ...]
    constants: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Draw:
    """One probe, flattened: logits ``[T, E]``, bias ``[E]``, ids and weights ``[T, k]``, scalars by place."""

    logits: torch.Tensor
    bias: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor
    scalars: dict[int, float]
    feeds: dict[fx.Node, torch.Tensor]


def router_reference(
    spec: RouterSpec,
    logits: torch.Tensor,
    top_k: int,
    bias: torch.Tensor | None = None,
    scaling_factor: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route tokens as ``spec`` says, in the dtype of ``logits``.

    Args:
        spec: the router.
        logits: ``[T, E]``.
        top_k: experts per token.
        bias: ``[E]``, where the spec has one.
        scaling_factor: stands for a RUNTIME factor.

    Returns:
        ids int64 ``[T, k]``, weights ``[T, k]``, by falling selection score.
    """
    scores, selection = _scores(spec, logits, bias)
    ids = selection.topk(top_k, dim=-1).indices
    factor = spec.scaling_factor if isinstance(spec.scaling_factor, float) else scaling_factor
    assert factor is not None, "a RUNTIME scaling factor must be given"
    return ids, _weights(spec, scores, ids) * factor


def _scores(spec: RouterSpec, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores that become weights, and those that experts are selected by, ``[T, E]`` each."""
    if spec.topk_before_scoring:
        return logits, logits
    scores = _score(spec.scoring, logits)
    selection = scores if bias is None else scores + bias
    if spec.num_groups == 1:
        return scores, selection
    groups = selection.reshape(*selection.shape[:-1], spec.num_groups, -1)
    best = groups.topk(min(2, groups.shape[-1]) if spec.group_score == "top2_sum" else 1, dim=-1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept.scatter_(-1, best.topk(spec.topk_groups, dim=-1).indices, True)
    return scores, torch.where(kept[..., None], groups, spec.group_fill).flatten(-2)


def _score(scoring: Scoring, logits: torch.Tensor) -> torch.Tensor:
    if scoring is Scoring.SOFTMAX:
        return logits.softmax(-1)
    return logits.sigmoid() if scoring is Scoring.SIGMOID else F.softplus(logits).sqrt()


def _weights(spec: RouterSpec, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Weights of the chosen experts ``[T, k]``, before scaling."""
    weights = scores.gather(-1, ids)
    if spec.topk_before_scoring:
        weights = _score(spec.scoring, weights)
    return weights / (weights.sum(-1, keepdim=True) + spec.renormalize_eps) if spec.renormalize else weights


def identify_router(
    ids: fx.Node, weights: fx.Node, num_experts: int, top_k: int, memo: Memo | None = None
) -> IdentifiedRouter:
    """The router that computes ``ids`` and ``weights``.

    Args:
        ids: integers ``[..., k]``.
        weights: floats of as many elements, in the same order.
        num_experts, top_k: E and k.
        memo: remembers what equal routers are.

    Raises:
        NoMatch: it is none of the catalogue; its ids and weights then have to be taken as given.
    """
    miss: NoMatch | None = None
    for logits in _logits_candidates(ids, weights, num_experts, top_k):
        try:
            piece = _piece(logits, ids, weights, num_experts, top_k)
            key = ("router", num_experts, top_k, shape_hint(logits), signature(piece.nodes[1:]),
                   piece.nodes.index(ids), piece.nodes.index(weights))  # fmt: skip
            spec, factor = _identify(piece) if memo is None else memo.get(key, lambda p=piece: _identify(p))  # type: ignore[misc]
        except NoMatch as error:
            if miss is None or error.progress > miss.progress:
                miss = error
            continue
        bias = None if piece.bias is None else piece.nodes[piece.bias]
        scalars = {} if factor is None else {"scaling_factor": piece.nodes[factor]}
        return IdentifiedRouter(spec, logits, bias, scalars)
    raise miss or NoMatch("{} and {} do not come from logits of {} experts", ids, weights, num_experts, node=ids)


def _logits_candidates(ids: fx.Node, weights: fx.Node, num_experts: int, top_k: int) -> list[fx.Node]:
    """Float nodes ``[T, E]`` that ids and weights depend on, the earliest first."""
    tokens = prod(shape_hint(ids) or ()) // top_k
    near: list[fx.Node] = [ids, weights]
    seen = set(near)
    for node in near:
        if len(near) > _MAX_NODES:
            break
        if _name(node) in _PRODUCTS:
            continue
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                near.append(source)
    products = [node for node in near if _name(node) in _PRODUCTS]
    found = [node for node in products if (shape_hint(node) or (0,))[-1] == num_experts]
    for node in cone([ids, weights], products) if len(near) <= _MAX_NODES else reversed(near):
        shape = shape_hint(node)
        if shape and shape[-1] == num_experts and prod(shape) == tokens * num_experts and _is_float(node):
            found.append(node)
    return found


def _name(node: fx.Node) -> str:
    return op_name(node.target) if isinstance(node.target, torch._ops.OpOverload) else ""


def _is_float(node: fx.Node) -> bool:
    dtype = dtype_of(node)
    return dtype is not None and dtype.is_floating_point


def _piece(logits: fx.Node, ids: fx.Node, weights: fx.Node, num_experts: int, top_k: int) -> _Piece:
    """Cut at ``logits``; refuses a cut through which other tensors enter."""
    nodes = (logits, *cone([ids, weights], [logits]))
    if len(nodes) > _MAX_NODES:
        raise NoMatch("{} does not bound the router", logits, node=logits)
    biases, scalars = [], []
    for place, node in enumerate(nodes[1:], start=1):
        if node.op == "call_function" and _name(node) not in _PRODUCTS:
            continue
        if dtype_of(node) is None or (
            node.op != "call_function" and constant_value(node) is not None and not _is_bias(node, num_experts)
        ):
            continue
        if node.op == "call_function" or not _is_float(node):
            raise NoMatch("the router reads {} beside its logits {}", node, logits, node=node)
        if shape_hint(node) == ():
            scalars.append(place)
        elif _is_bias(node, num_experts):
            biases.append(place)
        else:
            raise NoMatch("the router reads {} beside its logits {}", node, logits, node=node)
    if len(biases) > 1 or len(scalars) > 2:
        raise NoMatch("the router reads {} vectors and {} scalars", len(biases), len(scalars), node=ids)
    constants = sorted({number for node in nodes[1:] for number in numbers(node)})
    bias = biases[0] if biases else None
    return _Piece(nodes, ids, weights, num_experts, top_k, bias, tuple(scalars), tuple(constants))


def _is_bias(node: fx.Node, num_experts: int) -> bool:
    return _is_float(node) and prod(shape_hint(node) or ()) == num_experts


def _identify(piece: _Piece) -> tuple[RouterSpec, int | None]:
    """The router's spec, and the place of a RUNTIME scaling factor."""
    with isolated():
        draws = list(_draws(piece))
        for spec in _selections(piece):
            if not all(_selects(spec, draw, piece.top_k) for draw in draws):
                continue
            for weighted, factor in _weightings(spec, piece, draws[0]):
                if all(_weighs(weighted, factor, draw) for draw in draws):
                    _audit(piece, weighted)
                    return replace(weighted, dtype=_scoring_dtype(piece, weighted, draws[0])), factor
    raise NoMatch("the router at {} is none that is known", piece.ids, node=piece.ids, progress=0.5)


def _draws(piece: _Piece) -> Iterator[_Draw]:
    """Run the piece on logits and biases of several regimes."""
    generator = torch.Generator().manual_seed(0)
    regimes = [(1.0, 0.0, 0.1, 0.0), (4.0, 0.0, 0.5, 0.0), (0.3, 0.0, 0.05, 0.0), (2.0, 0.0, 0.3, -3.0),
               (2.0, 0.0, 0.3, 3.0), (1.0, -6.0, 0.3, -0.5), (1.0, 6.0, 0.5, 0.0), (12.0, 0.0, 2.0, 0.0)]  # fmt: skip
    small = [number for number in piece.constants if 0 < number < 1e-2]
    regimes += [(1.0, log(number) - 1.0, 0.1, 0.0) for number in small]
    shape = shape_hint(piece.nodes[0]) or ()
    for regime in regimes:
        tokens = 0
        while tokens < _MIN_TOKENS:
            draw = _run(piece, shape, regime, generator)
            tokens += draw.ids.shape[0]
            yield draw


def _run(
    piece: _Piece, shape: tuple[int, ...], regime: tuple[float, float, float, float], generator: torch.Generator
) -> _Draw:
    scale, shift, bias_scale, bias_shift = regime
    miss: NoMatch | None = None
    for small in probe_shapes(shape, _ROWS):
        logits = torch.randn(*small, dtype=torch.float64, generator=generator) * scale + shift
        feeds = {piece.nodes[0]: logits}
        bias = None
        if piece.bias is not None:
            root = piece.nodes[piece.bias]
            bias = torch.randn(piece.num_experts, dtype=torch.float64, generator=generator) * bias_scale + bias_shift
            feeds[root] = bias.reshape(shape_hint(root) or (-1,))
        scalars = {place: 0.5 + 2 * float(torch.rand((), generator=generator)) for place in piece.scalars}
        feeds |= {piece.nodes[place]: torch.tensor(value, dtype=torch.float64) for place, value in scalars.items()}
        try:
            ids, weights = evaluate([piece.ids, piece.weights], feeds)
        except NoMatch as error:
            miss = error
            continue
        flat = logits.reshape(-1, piece.num_experts)
        if ids.numel() != flat.shape[0] * piece.top_k or weights.numel() != ids.numel():
            raise NoMatch("{} and {} are not [T, {}]", piece.ids, piece.weights, piece.top_k, node=piece.ids)
        shaped = ids.reshape(-1, piece.top_k), weights.reshape(-1, piece.top_k)
        return _Draw(flat, bias, shaped[0], shaped[1], scalars, feeds)
    raise miss or NoMatch("{} has no rows", piece.nodes[0], node=piece.nodes[0])


def _selections(piece: _Piece) -> Iterator[RouterSpec]:
    """Every way to choose experts that the piece's numbers can fill; weights are left open."""
    before = not any(_name(node) in _SCORING_STEPS for node in cone([piece.ids], [piece.nodes[0]]))
    has_bias = piece.bias is not None
    if before and has_bias:
        raise NoMatch("the bias {} is added to logits", piece.nodes[piece.bias or 0], node=piece.ids, progress=0.4)
    for scoring in Scoring:
        plain = RouterSpec(scoring, topk_before_scoring=before, has_bias=has_bias)
        yield plain
        if before:
            continue
        for groups, kept, score, fill in _groups(piece):
            yield replace(plain, num_groups=groups, topk_groups=kept, group_score=score, group_fill=fill)


def _groups(piece: _Piece) -> Iterator[tuple[int, int, Literal["top2_sum", "max"], float]]:
    shapes = [shape_hint(node) or () for node in piece.nodes]
    counts = {s[-2] for s in shapes if len(s) > 1 and 1 < s[-2] < piece.num_experts == s[-2] * s[-1]}
    kept = {arg for node in piece.nodes if _name(node) == "topk" for arg in node.args[1:2] if isinstance(arg, int)}
    kept |= {1} if any(_name(node) in ("argmax", "max") for node in piece.nodes) else set()
    fills = [*(number for number in piece.constants if number < 0), 0.0]
    for count, topk_groups, score, fill in product(sorted(counts), sorted(kept), _GROUP_SCORES, fills):
        if topk_groups < count:
            yield count, topk_groups, score, fill


def _selects(spec: RouterSpec, draw: _Draw, top_k: int) -> bool:
    """Whether the draw's experts are a best choice. Equal scores may be chosen among in any order."""
    _, selection = _scores(spec, draw.logits, draw.bias)
    ids = draw.ids
    if int(ids.min()) < 0 or int(ids.max()) >= selection.shape[-1]:
        return False
    distinct = bool((ids.sort(-1).values.diff(dim=-1) != 0).all())
    best, chosen = selection.topk(top_k, dim=-1).values, selection.gather(-1, ids).sort(-1, descending=True).values
    return distinct and bool(((best == chosen) | ((best - chosen).abs() <= 1e-12 * best.abs())).all())


def _weightings(spec: RouterSpec, piece: _Piece, draw: _Draw) -> Iterator[tuple[RouterSpec, int | None]]:
    """Every way to weigh the chosen experts whose scaling the graph explains; RUNTIME factors by place."""
    small = [number for number in piece.constants if 0 < number < 1e-2]
    scores, _ = _scores(spec, draw.logits, draw.bias)
    finite = [number for number in piece.constants if number and isfinite(number)]
    literals = [1.0, *finite, *(1 / number for number in finite)]
    options = [replace(spec, renormalize=False)]
    options += [replace(spec, renormalize=True, renormalize_eps=eps) for eps in (*small, 0.0)]
    for option in options:
        base = _weights(option, scores, draw.ids)
        ratio = float((draw.weights / base).median())
        for value in literals:
            if abs(ratio - value) <= 1e-6 * abs(value):
                yield replace(option, scaling_factor=float(value)), None
        for place, value in draw.scalars.items():
            if abs(ratio - value) <= 1e-6 * abs(value):
                yield replace(option, scaling_factor=RUNTIME), place


def _weighs(spec: RouterSpec, factor: int | None, draw: _Draw) -> bool:
    if set(draw.scalars) - {factor}:
        return False
    scores, _ = _scores(spec, draw.logits, draw.bias)
    scale = draw.scalars[factor] if factor is not None else spec.scaling_factor
    assert isinstance(scale, float)
    return close(draw.weights, _weights(spec, scores, draw.ids) * scale, _MIN_TOLERANCE)


def _audit(piece: _Piece, spec: RouterSpec) -> None:
    """Every step that selects or cuts floats must be one that the accepted router makes.

    Raises:
        NoMatch: one is not.
    """
    known = {0.0, 1.0, spec.group_fill}
    if spec.scoring is Scoring.SQRT_SOFTPLUS:
        known.add(_SOFTPLUS_THRESHOLD)
    harmless = {"where", "masked_fill", "eq", "ne", "lt", "le", "gt", "ge"}
    for node in piece.nodes[1:]:
        if _name(node) not in SELECTING or not any(map(_is_float, node.all_input_nodes)):
            continue
        allowed = harmless | ({"softplus"} if spec.scoring is Scoring.SQRT_SOFTPLUS else set())
        mentioned: list[float] = [] if _name(node) == "softplus" else numbers(node)
        for source in node.all_input_nodes:
            mentioned += [] if source.all_input_nodes or _is_bias(source, piece.num_experts) else numbers(source)
        if _name(node) not in allowed or not known.issuperset(mentioned):
            raise NoMatch("{} ({}) is no step of {}", node, node.target, spec, node=node, progress=0.6)


def _scoring_dtype(piece: _Piece, spec: RouterSpec, draw: _Draw) -> torch.dtype:
    """The dtype that scores pass through on their way to selection, or are made in after it."""
    if spec.topk_before_scoring:
        scores = _weights(replace(spec, renormalize=False), draw.logits, draw.ids)
        near = piece.nodes[1:]
    else:
        scores = _score(spec.scoring, draw.logits)
        near = tuple(cone([piece.ids], [piece.nodes[0]]))
    alike = [node for node in near if _is_float(node)]
    values: Sequence[Any] = evaluate(alike, draw.feeds)
    dtypes = [
        dtype_of(node) or torch.float32
        for node, value in zip(alike, values, strict=True)
        if value.numel() == scores.numel() and close(value.reshape(scores.shape), scores)
    ]
    if not dtypes:
        return torch.float32
    return dtypes[0] if spec.topk_before_scoring else max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
