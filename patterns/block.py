"""A whole block as it is written, whichever form it has: what the structural reading hands on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from ..matching import PackedWeight, Source
from ..spec import ActivationSpec, GateUpOrder, Operand
from .signature import Memo


@dataclass(frozen=True, slots=True)
class Feed:
    """What a node at which a region is cut holds of an operand.

    Attributes:
        expert: the one expert whose values these are; None: of all.
        half: the first (0) or second (1) half of the rows of w13; None: all rows.
        k_first: a weight that stands as ``[..., K, N]``.
        spread: routing weights that stand as ``[T, E]``, zero but at the token's experts.
    """

    operand: Operand
    expert: int | None = None
    half: int | None = None
    k_first: bool = False
    spread: bool = False

    def __str__(self) -> str:
        of_expert = "" if self.expert is None else f"_expert{self.expert}"
        of_rows = "" if self.half is None else f"_half{self.half}"
        return (
            f"{self.operand}{of_expert}{of_rows}{'_k_first' if self.k_first else ''}{'_spread' if self.spread else ''}"
        )


@dataclass(frozen=True, slots=True)
class Block:
    """A block as it is written.

    Attributes:
        form: name of the pattern that read it.
        hidden: ``[T, H]``, the node that is gathered, in the dtype it has there.
        ids, weights: ``[T, k]`` or views of it, weights in the dtype they multiply in.
        w13, w2: the packed weights; ``w13_bias`` and ``w2_bias`` as ``Operand`` says, or None.
        k_first: whether the graph stores weights as ``[E, K, N]``.
        order: how gate and up share the rows of w13.
        scalars: the activation's knobs that the graph takes at run time.
        output: ``[T, H]``.
        masked: whether rows whose id is no expert's are zeroed on the way.
        weights_dtype: of weights that no node holds.
        weight_on_input: whether routing weights scale the rows that go in, instead of those that come out.
        feeds: the nodes at which the region is cut, weights behind their dequantisation.
        explained: every node on the way of the activations that was read, views left out.
        branches: what the graph runs every token over at once, "E" all experts or "k" its slots, or "".
        repeats: whether a token may have an expert twice, which then counts twice.
    """

    form: str
    hidden: fx.Node
    ids: fx.Node
    weights: Source
    top_k: int
    w13: PackedWeight
    w2: PackedWeight
    w13_bias: Source | None
    w2_bias: Source | None
    k_first: bool
    activation: ActivationSpec
    order: GateUpOrder
    scalars: Mapping[Operand, fx.Node]
    output: fx.Node
    feeds: Mapping[fx.Node, Feed]
    explained: frozenset[fx.Node]
    masked: bool = False
    weights_dtype: torch.dtype | None = None
    weight_on_input: bool = False
    branches: str = ""
    repeats: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """GEMMs that could be the experts of one block of ``form``; ``read`` raises ``NoMatch`` where they are not."""

    form: str
    gemms: tuple[fx.Node, ...]
    read: Callable[[Memo], Block]
