"""The graph of a router, cut at its logits, and its values on random ones.

Probes come in regimes that tell near twins apart: biases that make every score negative show what masked groups
are filled with, scores that nearly vanish show what is added to their sum, logits that lie close together show
which of them a sparse softmax counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log, prod

import torch
from torch import fx

from ..matching import NoMatch
from .probing import cone, constant_value, dtype_of, evaluate, shape_hint
from .resizing import probe_shapes
from .steps import CLAMPS, name_of, numbers

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "einsum", "_grouped_mm", "_scaled_mm"}
"""The logits come out of one of these; nothing before them is part of a router."""

MAX_NODES = 400
_ROWS = 48
_MIN_TOKENS = 8
_MAX_SCALARS = 3
_TINY = 1e-2
"""A number below this may be what keeps a sum from zero."""


@dataclass(frozen=True, slots=True)
class RouterPiece:
    """The graph between logits and outputs, in topological order; the logits first, then ids where they are given.

    Attributes:
        weights: floats ``[T, k]``, or scores ``[T, E]`` that are read at the ids.
        num_classes: columns of the logits.
        bias, expert_scale: places of vectors that are read on the way to the ids, and on the way to the weights only.
        scalars: places of inputs of one element.
        constants: every number that the piece mentions; ``tiny`` those that may keep a sum from zero, ``floors``
            those of them that clamps mention.
    """

    nodes: tuple[fx.Node, ...]
    ids: fx.Node
    weights: fx.Node
    num_experts: int
    num_classes: int
    top_k: int
    ids_given: bool
    bias: int | None
    expert_scale: int | None
    scalars: tuple[int, ...]
    constants: tuple[float, ...]
    tiny: tuple[float, ...]
    floors: tuple[float, ...]

    @property
    def logits(self) -> fx.Node:
        return self.nodes[0]

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return self.nodes[: 2 if self.ids_given else 1]

    @property
    def steps(self) -> tuple[fx.Node, ...]:
        return self.nodes[len(self.inputs) :]

    @property
    def choosing(self) -> list[fx.Node]:
        """The nodes between logits and ids."""
        return cone([self.ids], self.inputs)


@dataclass(frozen=True, slots=True)
class RouterDraw:
    """One probe, flattened: logits ``[T, C]``, vectors ``[E]``, ids and weights ``[T, k]``, scalars by place."""

    logits: torch.Tensor
    bias: torch.Tensor | None
    expert_scale: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor
    scalars: Mapping[int, float]
    feeds: Mapping[fx.Node, torch.Tensor]

    @property
    def scale(self) -> float:
        """The product of the scalar inputs."""
        return prod(self.scalars.values())


def is_float(node: fx.Node) -> bool:
    dtype = dtype_of(node)
    return dtype is not None and dtype.is_floating_point


def cut(
    logits: fx.Node,
    ids: fx.Node,
    weights: fx.Node,
    products: Sequence[fx.Node],
    num_experts: int,
    top_k: int,
    *,
    ids_given: bool,
) -> RouterPiece:
    """Cut at ``logits``, and at ``ids`` where they are given.

    Args:
        products: the nearest products that ids and weights depend on.

    Raises:
        NoMatch: other tensors enter through the cut.
    """
    given = (logits, ids) if ids_given else (logits,)
    nodes = (*given, *cone([weights] if ids_given else [ids, weights], [*given, *products]))
    if len(nodes) > MAX_NODES:
        raise NoMatch("{} does not bound the router", logits, node=logits)
    classes = (shape_hint(logits) or (0,))[-1]
    vectors, scalars = [], []
    for place, node in enumerate(nodes[len(given) :], start=len(given)):
        if node.op == "call_function":
            others = [source for source in node.all_input_nodes if source in products and source is not logits]
            if others:
                raise NoMatch("the router reads {} beside its logits {}", others[0], logits, node=node)
        elif _is_vector(node, num_experts, classes):
            vectors.append(place)
        elif dtype_of(node) is not None and constant_value(node) is None:
            if not is_float(node) or prod(shape_hint(node) or ()) != 1:
                raise NoMatch("the router reads {} beside its logits {}", node, logits, node=node)
            scalars.append(place)
    choosing = () if ids_given else set(cone([ids], given))
    biases = [place for place in vectors if nodes[place] in choosing]
    scales = [place for place in vectors if nodes[place] not in choosing]
    if len(biases) > 1 or len(scales) > 1 or len(scalars) > _MAX_SCALARS:
        counts = len(vectors), len(scalars)
        raise NoMatch("the router reads {} vectors and {} scalars", *counts, node=ids)
    steps = nodes[len(given) :]
    constants = sorted({number for node in steps for number in numbers(node)})
    floors = {number for node in steps if name_of(node) in CLAMPS for number in _mentioned(node)}
    return RouterPiece(
        nodes, ids, weights, num_experts, classes, top_k, ids_given,
        bias=biases[0] if biases else None,
        expert_scale=scales[0] if scales else None,
        scalars=tuple(scalars),
        constants=tuple(constants),
        tiny=tuple(number for number in constants if 0 < number < _TINY),
        floors=tuple(sorted(number for number in floors if 0 < number < _TINY)),
    )  # fmt: skip


def _is_vector(node: fx.Node, num_experts: int, num_classes: int) -> bool:
    return is_float(node) and prod(shape_hint(node) or ()) in {num_experts, num_classes} - {1}


def _mentioned(node: fx.Node) -> list[float]:
    return numbers(node) + [n for source in node.all_input_nodes for n in numbers(source) if not source.all_input_nodes]


def draws(piece: RouterPiece) -> Iterator[RouterDraw]:
    """Run the piece on logits and biases of several regimes: (scale, shift) of logits, then of the bias."""
    generator = torch.Generator().manual_seed(0)
    regimes = [(1.0, 0.0, 0.1, 0.0), (4.0, 0.0, 0.5, 0.0), (0.3, 0.0, 0.05, 0.0), (2.0, 0.0, 0.3, -3.0),
               (2.0, 0.0, 0.3, 3.0), (1.0, -6.0, 0.3, -0.5), (1.0, 6.0, 0.5, 0.0), (12.0, 0.0, 2.0, 0.0),
               (0.05, 6.0, 0.02, 0.0), (0.05, -6.0, 0.02, 0.0)]  # fmt: skip
    regimes += [(1.0, log(number) - 1.0, 0.1, 0.0) for number in piece.tiny]
    regimes += [(40.0, 0.0, 2.0, 0.0)] if piece.floors else []
    shape = shape_hint(piece.logits) or ()
    for regime in regimes:
        tokens = 0
        while tokens < _MIN_TOKENS:
            draw = _run(piece, shape, regime, generator)
            tokens += draw.ids.shape[0]
            yield draw


def _run(
    piece: RouterPiece, shape: tuple[int, ...], regime: tuple[float, float, float, float], generator: torch.Generator
) -> RouterDraw:
    scale, shift, bias_scale, bias_shift = regime
    miss: NoMatch | None = None

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, dtype=torch.float64, generator=generator)

    for small in probe_shapes(shape, _ROWS):
        feeds = {piece.logits: normal(*small) * scale + shift}
        if piece.ids_given:
            feeds[piece.ids] = _random_ids(piece, shape, small, generator)
        for place, values in ((piece.bias, normal(_size(piece, piece.bias)) * bias_scale + bias_shift),
                              (piece.expert_scale, normal(_size(piece, piece.expert_scale)) + 0.3)):  # fmt: skip
            if place is not None:
                feeds[piece.nodes[place]] = values.reshape(shape_hint(piece.nodes[place]) or (-1,))
        scalars = {place: 0.5 + 2 * float(torch.rand((), generator=generator)) for place in piece.scalars}
        for place, value in scalars.items():
            feeds[piece.nodes[place]] = torch.full(shape_hint(piece.nodes[place]) or (), value, dtype=torch.float64)
        try:
            ids, weights = evaluate([piece.ids, piece.weights], feeds)
        except NoMatch as error:
            miss = error
            continue
        return _draw(piece, feeds, ids, weights, scalars)
    raise miss or NoMatch("{} has no rows", piece.logits, node=piece.logits)


def _draw(
    piece: RouterPiece,
    feeds: Mapping[fx.Node, torch.Tensor],
    ids: torch.Tensor,
    weights: torch.Tensor,
    scalars: Mapping[int, float],
) -> RouterDraw:
    logits = feeds[piece.logits].reshape(-1, piece.num_classes)
    if ids.numel() != logits.shape[0] * piece.top_k:
        raise NoMatch("{} is not [T, {}]", piece.ids, piece.top_k, node=piece.ids)
    ids = ids.reshape(-1, piece.top_k).long()
    if int(ids.min()) < 0 or int(ids.max()) >= piece.num_experts:
        raise NoMatch("{} chooses what is no expert", piece.ids, node=piece.ids)
    if weights.numel() == logits.shape[0] * piece.num_experts != ids.numel():
        weights = weights.reshape(-1, piece.num_experts).gather(-1, ids)
    if weights.numel() != ids.numel():
        raise NoMatch("{} is not [T, {}]", piece.weights, piece.top_k, node=piece.ids)
    vectors = [None if place is None else feeds[piece.nodes[place]].flatten()
               for place in (piece.bias, piece.expert_scale)]  # fmt: skip
    return RouterDraw(logits, vectors[0], vectors[1], ids, weights.reshape(-1, piece.top_k), scalars, feeds)


def _size(piece: RouterPiece, place: int | None) -> int:
    return 0 if place is None else prod(shape_hint(piece.nodes[place]) or ())


def _random_ids(
    piece: RouterPiece, shape: tuple[int, ...], small: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    """Distinct experts for every token, in the shape of the given ids."""
    if shape_hint(piece.ids) != (*shape[:-1], piece.top_k):
        raise NoMatch("{} and {} are not of the same tokens", piece.ids, piece.logits, node=piece.ids)
    order = torch.rand(*small[:-1], piece.num_experts, generator=generator)
    return order.topk(piece.top_k, dim=-1).indices.to(dtype_of(piece.ids))
