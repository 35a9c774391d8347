"""What recognition hands on: matches, near misses, and the refusals that run between patterns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .formats import BlockFormat
from .spec import MoESpec, Operand

WRITTEN = "fp4_written"
"""Key in ``fx.Node.meta`` of what a rewrite wrote: recognition takes nothing of it for a model's own."""


class NoMatch(Exception):
    """Control flow of recognition: this is not the idiom. Never leaves ``find_matches``.

    ``template.format(*args)`` is only evaluated when somebody reads the message. ``progress`` counts
    how far a pattern came (0..1), so that the nearest miss can be kept.
    """

    def __init__(self, template: str, *args: object, node: fx.Node | None = None, progress: float = 0.0) -> None:
        super().__init__(template)
        self.template, self.format_args, self.node, self.progress = template, args, node, progress

    def __str__(self) -> str:
        return self.template.format(*self.format_args)


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """Where a node comes from in the user's code. For messages, never for correctness."""

    file: str
    line: int
    code: str
    module: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.file else "<unknown>"
        return f"{self.module} ({where})" if self.module else where


@dataclass(frozen=True, slots=True)
class Assembled:
    """An operand that the graph holds in parts, or in another layout than kernels read.

    ``function(*parts)`` is its canonical form (see ``Operand``): plain torch, traceable by ``make_fx``, and equal
    to another only where it computes the same, so that equal operands are one: a function of a module, or a frozen
    dataclass that can be called.
    """

    function: Callable[..., torch.Tensor]
    parts: tuple[fx.Node, ...]


Source: TypeAlias = "fx.Node | Assembled"
"""Where an operand comes from: a node that reshapes to its canonical form, or what makes it from nodes."""


def nodes_of(source: Source | None) -> tuple[fx.Node, ...]:
    """The nodes of the graph that an operand is made from."""
    if source is None:
        return ()
    return source.parts if isinstance(source, Assembled) else (source,)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """FP4 weights of all experts as the graph holds them, found behind a dequantisation.

    The nodes are the roots (placeholders or get_attr). ``codes`` reshapes (trailing axes merged) to
    ``[E, N, K/2]``, ``scale`` to ``[E, N, K/bs]``, ``global_scale`` to ``[E or 1, N or 1]``.
    """

    codes: Source
    scale: Source
    global_scale: Source | None
    format: BlockFormat
    shape: tuple[int, int, int]  # E, N, K


@dataclass(frozen=True, slots=True)
class Match:
    """One recognised MoE block.

    ``output`` has T*H elements and is replaced; ``nodes`` is the region that this makes dead; ``operands``
    say where what the fused op reads comes from (hidden states and expert ids are single nodes). ``grade`` is
    "full" where the router was recognised too (``spec.router`` says how), else "experts".
    """

    pattern: str
    grade: Literal["experts", "full"]
    spec: MoESpec
    output: fx.Node
    nodes: frozenset[fx.Node]
    operands: Mapping[Operand, Source]
    where: SourceLocation

    def node(self, operand: Operand) -> fx.Node:
        """The one node that holds ``operand``."""
        source = self.operands[operand]
        assert isinstance(source, fx.Node), f"{operand} is assembled from {len(source.parts)} nodes"
        return source


@dataclass(frozen=True, slots=True)
class NearMiss:
    """An FP4 weight that feeds no recognised block, with the furthest pattern's reason."""

    anchor: str
    pattern: str
    reason: str
    progress: float
    packed_bytes: int
    where: SourceLocation


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """An FP4 weight that every token goes through, as in attention or a shared expert: it runs dequantised."""

    anchor: str
    packed_bytes: int
    where: SourceLocation


@dataclass(frozen=True, slots=True)
class Recognition:
    """What a graph holds: its MoE blocks in graph order, and the FP4 weights that are in none.

    ``linear_layers`` are those of layers that every token goes through, of which no block could be made.
    """

    matches: tuple[Match, ...]
    near_misses: tuple[NearMiss, ...]
    linear_layers: tuple[LinearLayer, ...] = ()


def find_matches(graph: fx.Graph) -> Recognition:
    """Recognise the MoE blocks of a functional ATen graph with fake values in ``meta["val"]``.

    Never changes the graph, adds no guard, and never raises for a graph that it does not understand.
    """
    from .patterns.search import search  # patterns speak in the types above

    # Compilers call this under a fake mode, in which nothing could be computed.
    with unset_fake_temporarily():
        return search(graph)
