"""Recognise FP4 weights behind any spelling of their dequantisation.

The float weight of a GEMM is followed back to where its bytes and factors come from (``provenance``). What lies
between is told by numbers (``decoding``), and how the bytes lie becomes a re-layout (``packing``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from torch import fx

from ..matching import Assembled, NoMatch, PackedWeight, Source
from .decoding import Decoded, Picks, decoded
from .graph_tools import CAST, arguments, aten, is_call, swaps_last_two
from .packing import TABLES, Codes, Globals, Lay, Relayout, Scales, may_scale
from .probing import WIDE_FLOATS, cone, constant_value, dtype_of, shape_hint
from .provenance import BYTES, Kind, Origin, leaves_of, origins, picked, picks, replay
from .signature import Memo, signature
from .weights import ExpertWeight, Share, holds_one, join_expert_halves, join_halves, stack_experts

logger = logging.getLogger(__name__)

_MAX_CONE = 4000
_RAN = 0.5
"""Progress of a refusal by numbers."""


def identify_packed_weight(node: fx.Node, memo: Memo | None = None) -> PackedWeight:
    """The packed weight that ``node`` dequantises; see ``identify``."""
    return identify(node, memo)[0]


def identify(node: fx.Node, memo: Memo | None = None) -> tuple[PackedWeight, bool]:
    """The packed weight that ``node`` dequantises, and whether ``node`` holds it transposed.

    Args:
        node: float weight of a GEMM, ``[E, N, K]``, or ``[E, K, N]`` (transposed).
        memo: remembers what equal cones are.

    Raises:
        NoMatch: ``node`` is not FP4 codes and scales decoded as one of the formats is.
    """
    if len(shape_hint(node) or ()) != 3 or dtype_of(node) not in WIDE_FLOATS:
        raise NoMatch("{} is not a float tensor of rank 3", node, node=node)
    memo = Memo() if memo is None else memo
    return memo.get(("weights", node), lambda: _identify(node, memo))


def _identify(node: fx.Node, memo: Memo) -> tuple[PackedWeight, bool]:
    stacked, flipped = _stacked(node)
    if stacked:
        experts = [identify_expert(part, memo) for part in stacked]
        if len({expert.transposed for expert in experts}) != 1:
            raise NoMatch("{} stacks weights that lie unlike", node, node=node, progress=0.4)
        return stack_experts(experts), experts[0].transposed != flipped
    halves, flipped = _halves(node)
    if halves:
        packed, transposed = zip(*(identify(half, memo) for half in halves), strict=True)
        _check_halves(node, transposed)
        return join_halves(packed), transposed[0] != flipped
    piece = _Piece(node, memo)
    found = piece.found
    return (
        PackedWeight(
            piece.source(found.roles.codes, found.codes, found.roles.table),
            piece.source(found.roles.scale, found.scale),
            None if found.global_scale is None else piece.source(found.roles.global_scale, found.global_scale),
            found.format,
            found.shape,
        ),
        found.transposed,
    )


def identify_expert(node: fx.Node, memo: Memo | None = None) -> ExpertWeight:
    """The packed weight of one expert that ``node`` dequantises, for experts that a graph treats one by one.

    Where the expert is picked from tensors of all experts, before they are decoded or after, the shares say
    which index it has; ``stack_experts`` gives those tensors back, without a copy. ::

        w2 = stack_experts([identify_expert(gemm.args[1], memo) for gemm in down_gemms])  # in order of experts

    Args:
        node: float weight ``[N, K]``, or ``[K, N]`` (``transposed``).
        memo: remembers what equal cones are; experts and layers that are written alike are proved once.

    Raises:
        NoMatch: ``node`` is not FP4 codes and scales decoded as one of the formats is.
    """
    if not _is_float_matrix(node):
        raise NoMatch("{} is not a float matrix", node, node=node)
    memo = Memo() if memo is None else memo
    inner, flipped = _unwrapped(node)
    pick = picked(inner)
    if pick is not None and dtype_of(pick[0]) in WIDE_FLOATS and len(shape_hint(pick[0]) or ()) == 3:
        whole, index = pick
        packed, transposed = identify(whole, memo)
        experts, rows, columns = packed.shape
        factor = packed.global_scale
        return ExpertWeight(
            Share(packed.codes, index, experts),
            Share(packed.scale, index, experts),
            None if factor is None else Share(factor) if holds_one(factor) else Share(factor, index, experts),
            packed.format,
            (rows, columns),
            transposed != flipped,
        )
    halves, flipped = _halves(node)
    if halves:
        parts = [identify_expert(half, memo) for half in halves]
        _check_halves(node, [part.transposed for part in parts])
        return replace(join_expert_halves(parts), transposed=parts[0].transposed != flipped)
    piece = _piece_of_expert(node, memo)
    found = piece.found
    return ExpertWeight(
        piece.share(found.roles.codes, found.codes, found.roles.table),
        piece.share(found.roles.scale, found.scale),
        None if found.global_scale is None else piece.share(found.roles.global_scale, found.global_scale),
        found.format,
        found.shape[1:],
        found.transposed,
    )


class _Piece:
    """What lies between the origins of a weight and the weight, and its reading."""

    def __init__(self, node: fx.Node, memo: Memo, picks: Picks | None = None) -> None:
        """``picks``: where one expert is picked from what is computed for all."""
        self.picks = picks
        above = _cone(node, [node] if picks is None else picks.bases)
        experts, first, second = (1, *(shape_hint(node) or ()))[-3:]
        experts = experts if picks is None else picks.count
        self.origins = origins(above, _fitting(experts, first, second))
        starts = [origin.node for origin in self.origins]
        rest = cone([node] if picks is None else picks.bases, starts)
        self.nodes = [*starts, *rest]
        key = [signature(self.nodes, inputs=len(starts))]
        if picks is not None:
            below = cone([node], picks.nodes)
            places = tuple(self.nodes.index(base) for base in picks.bases)
            key += [picks.count, places, signature([*picks.nodes, *below], inputs=len(picks.nodes))]
            rest = [*rest, *below]
        self.found: Decoded = memo.get(("decoded", *key), lambda: decoded(node, self.origins, rest, picks))
        if self.found.codes.high_first:
            logger.debug("%s: the high nibble of a byte comes first; a re-layout exchanges them", node)

    def source(self, place: int | None, layout: Codes | Scales | Globals, table: int | None = None) -> Source:
        """The operand that lies at ``place`` as ``layout`` says, decoded by a table if there is one."""
        assert place is not None
        places = [place] if table is None else [place, table]
        return _source([self._origin(each) for each in places], layout)

    def share(self, place: int | None, layout: Codes | Scales | Globals, table: int | None = None) -> Share:
        """The same of one expert: an index of a tensor that holds all of them, where it is that."""
        assert place is not None
        origin = self._origin(place)
        if self.picks is not None:
            shared = isinstance(layout, Globals) and "experts" not in layout.axes
            source = self.source(place, layout, table)
            return Share(source) if shared else Share(source, self.picks.index, self.picks.count)
        pick = picked(origin.node)
        if pick is None:
            return Share(self.source(place, layout, table))
        base, index = pick
        experts = (shape_hint(base) or (1,))[0]
        every = [Origin(base, leaves_of(base), origin.kind)]
        if table is not None:
            every.append(self._origin(table))
        return Share(_source(every, _for_experts(layout, experts)), index, experts)

    def _origin(self, place: int) -> Origin:
        if place < len(self.origins):
            return self.origins[place]
        return Origin(self.nodes[place], (self.nodes[place],), "floats")


def _source(parts: Sequence[Origin], layout: Codes | Scales | Globals) -> Source:
    makers = tuple((replay(part.node, part.leaves), len(part.leaves)) for part in parts)
    if len(parts) == 1 and makers[0][0] is None and layout.is_canonical:
        return parts[0].leaves[0]
    return Assembled(Relayout(makers, layout), tuple(leaf for part in parts for leaf in part.leaves))


def _for_experts(layout: Codes | Scales | Globals, experts: int) -> Codes | Scales | Globals:
    """The layout of what holds ``experts`` of what ``layout`` describes, one after another."""
    if isinstance(layout, Globals):
        return replace(layout, experts=experts, axes=("experts", *layout.axes))
    return replace(layout, lay=replace(layout.lay, experts=experts))


def _piece_of_expert(node: fx.Node, memo: Memo) -> _Piece:
    """What decodes one expert from its own bytes, or from the bytes of all of which it picks its own later."""
    try:
        return _Piece(node, memo)
    except NoMatch as miss:
        late = _late_picks(node)
        if late is None or miss.progress >= _RAN:
            raise
        return _Piece(node, memo, late)


def _late_picks(node: fx.Node) -> Picks | None:
    """Where ``node`` picks one index from tensors of all experts; None where it is not one index of equally many."""
    found = {member: pick for member in cone([node], ()) if (pick := picks(member)) is not None}
    counts = {(shape_hint(base) or (0,))[0] for base, _ in found.values()}
    indices = {index for _, index in found.values()}
    if len(counts) != 1 or len(indices) != 1:
        return None
    return Picks(tuple(found), tuple(base for base, _ in found.values()), *counts, *indices)


def _cone(node: fx.Node, ends: Sequence[fx.Node]) -> list[fx.Node]:
    """Everything that ``node`` is made from, up to ``ends``.

    Raises:
        NoMatch: something in it is no part of a weight.
    """
    nodes = cone(ends, ())
    if len(nodes) > _MAX_CONE:
        raise NoMatch("{} depends on {} nodes: no weight", node, len(nodes), node=node)
    for leaf in nodes:
        dtype = dtype_of(leaf)
        if leaf.op != "call_function" and dtype not in (None, *BYTES, *WIDE_FLOATS) and constant_value(leaf) is None:
            raise NoMatch("{} reads {} ({}), which is no part of a packed weight", node, leaf, dtype, node=leaf)
    return nodes


def _fitting(experts: int, first: int, second: int) -> dict[Kind, Callable[[tuple[int, ...]], bool]]:
    """Which shapes origins of a weight may have."""
    ways = ((experts, first), (experts, second))

    def may_be_packed(shape: tuple[int, ...]) -> bool:
        return any(Lay(*way, k_first).shape_for(shape, 1, 1) for way in ways for k_first in (False, True))

    def may_be_factor(shape: tuple[int, ...]) -> bool:
        return shape in TABLES or any(may_scale(shape, *way) for way in ways)

    return {"bytes": may_be_packed, "floats": may_be_factor}


def _unwrapped(node: fx.Node) -> tuple[fx.Node, bool]:
    """``node`` behind roundings, copies and matrix transposes, and whether those transpose it."""
    flipped = False
    while True:
        base = node.all_input_nodes[0] if node.all_input_nodes else None
        if base is None or dtype_of(base) not in WIDE_FLOATS:
            return node, flipped
        sizes, inner = (shape_hint(each) or () for each in (node, base))
        if swaps_last_two(node):
            flipped = not flipped
        elif not (is_call(node, CAST, *_SHOWING) and sizes[-2:] == inner[-2:] and prod(sizes) == prod(inner)):
            return node, flipped
        node = base


_SHOWING = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.clone.default, aten.alias.default, aten._to_copy.default,
)  # fmt: skip


def _stacked(node: fx.Node) -> tuple[list[fx.Node], bool]:
    """The weights of single experts that make up ``node``, and whether it transposes them; none if it is no stack."""
    joined, flipped = _unwrapped(node)
    experts = (shape_hint(node) or (0,))[0]
    if is_call(joined, aten.view.default, aten.reshape.default):  # rows of all experts below each other
        joined = joined.all_input_nodes[0]
    if not is_call(joined, aten.cat.default, aten.stack.default) or (arguments(joined)["dim"] or 0) != 0:
        return [], False
    parts = [part for part in arguments(joined)["tensors"] if isinstance(part, fx.Node)]
    if len(parts) != experts or not all(_is_float_matrix(part) for part in parts):
        return [], False
    return parts, flipped


def _halves(node: fx.Node) -> tuple[list[fx.Node], bool]:
    """The weights of gate and up that are joined to ``node``, and whether it transposes them; none if it is not."""
    joined, flipped = _unwrapped(node)
    if not is_call(joined, aten.cat.default) or len(arguments(joined)["tensors"]) != 2:
        return [], False
    parts = [part for part in arguments(joined)["tensors"] if dtype_of(part) in WIDE_FLOATS]
    alike = len({shape_hint(part) for part in parts}) == 1 and len(shape_hint(joined) or ()) == len(
        shape_hint(node) or ()
    )
    return (parts, flipped) if alike and len(parts) == 2 else ([], False)


def _check_halves(node: fx.Node, transposed: Sequence[bool]) -> None:
    """Refuse halves that are not joined along their rows."""
    joined = _unwrapped(node)[0]
    rank = len(shape_hint(joined) or ())
    rows = rank - 1 if transposed[0] else rank - 2
    if transposed[0] != transposed[1] or (arguments(joined)["dim"] or 0) % rank != rows:
        raise NoMatch("{} joins weights along another axis than rows", node, node=node, progress=0.4)


def _is_float_matrix(node: fx.Node) -> bool:
    sizes = shape_hint(node) or ()
    return dtype_of(node) in WIDE_FLOATS and (len(sizes) == 2 or (len(sizes) == 3 and sizes[0] == 1))
