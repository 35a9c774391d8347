"""The structural reading of a whole block: two expert GEMMs, what lies between, and the combine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from ..matching import NoMatch, PackedWeight
from ..spec import ActivationSpec, GateUpOrder, Operand
from .activation import identify_activation
from .combine import read_combine
from .dequantize import identify
from .gemm import ExpertGemm, Projection, read_projection
from .graph_tools import dtype, numel, same, shape, source, stage
from .masks import unmasked
from .probing import cone
from .rows import unbounded
from .signature import Memo


@dataclass(frozen=True, slots=True)
class Block:
    """A block as it is written.

    Attributes:
        hidden: ``[T, H]``, the node that is gathered, in the dtype it has there.
        ids, weights: ``[T, k]`` or views of it.
        up, down: the two projections; ``w13`` and ``w2`` their packed weights.
        order: how gate and up share the rows of w13.
        scalars: the activation's knobs that the graph takes at run time.
        output: ``[T, H]``.
        masked: whether rows whose id is no expert's are zeroed on the way.
        explained: every node on the way of the activations that was read, views left out.
    """

    hidden: fx.Node
    ids: fx.Node
    weights: fx.Node
    top_k: int
    up: Projection
    down: Projection
    w13: PackedWeight
    w2: PackedWeight
    activation: ActivationSpec
    order: GateUpOrder
    scalars: Mapping[Operand, fx.Node]
    output: fx.Node
    masked: bool
    explained: frozenset[fx.Node]

    @property
    def feeds(self) -> dict[fx.Node, Operand]:
        """The nodes at which the region is cut. Weights are cut behind their dequantisation."""
        optional = {Operand.W13_BIAS: self.up.bias, Operand.W2_BIAS: self.down.bias, **self.scalars}
        return {
            self.hidden: Operand.HIDDEN,
            self.ids: Operand.TOPK_IDS,
            self.weights: Operand.TOPK_WEIGHTS,
            self.up.gemm.weight: Operand.W13,
            self.down.gemm.weight: Operand.W2,
            **{node: operand for operand, node in optional.items() if node is not None},
        }


def read_block(up: ExpertGemm, down: ExpertGemm, memo: Memo) -> Block:
    """Read the block whose first GEMM is ``up`` and whose second is ``down``.

    Raises:
        NoMatch: something is not as in a mixture-of-experts block.
    """
    with stage(0.3):
        if (up.form, up.order) != (down.form, down.order):
            raise NoMatch("{} and {} do not run the same rows", up.node.name, down.node.name, node=down.node)
        ids = up.order.ids
        experts = up.sizes[0]
        top_k = _top_k(ids, experts)
    with stage(0.4):
        rows = unmasked(source(up.rows), up.order, experts)
        hidden = up.order.per_token(rows or up.rows, top_k)
        gathered = cone([up.rows], [hidden, *up.order.nodes])
        first, second = read_projection(up), read_projection(down)
    with stage(0.5):
        w13, w2 = _packed(up, memo), _packed(down, memo)
        _check_sizes(w13, w2, hidden, up, top_k)
    with stage(0.6):
        result = source(down.rows)
        activation = identify_activation(result, first.out, w2.shape[2], memo)
        scalars = dict(activation.scalars)
        between = cone([down.rows], [first.out, *scalars.values()])
    with stage(0.7):
        combine = read_combine(second.out, down.order, top_k, experts)
    explained = {*gathered, *first.nodes, *between, *second.nodes, *combine.nodes}
    return Block(
        hidden=hidden,
        ids=ids,
        weights=combine.weights,
        top_k=top_k,
        up=first,
        down=second,
        w13=w13,
        w2=w2,
        activation=activation.spec,
        order=activation.order,
        scalars=scalars,
        output=combine.output,
        masked=rows is not None or first.masked or second.masked or combine.masked,
        explained=frozenset(explained),
    )


def _top_k(ids: fx.Node, num_experts: object) -> int:
    sizes = shape(unbounded(ids, num_experts))
    if len(sizes) < 2 or not isinstance(sizes[-1], int) or dtype(ids) not in (torch.int64, torch.int32):
        raise NoMatch("expert ids {} are not integers [T, k] with a constant k", ids.name, node=ids)
    return sizes[-1]


def _packed(gemm: ExpertGemm, memo: Memo) -> PackedWeight:
    """The packed weight of a GEMM, whose blocks must lie along the axis that the GEMM sums over."""
    packed, transposed = identify(gemm.weight, memo)
    if transposed != gemm.k_first:
        raise NoMatch("{} sums over an axis that its scales do not run along", gemm.node.name, node=gemm.node)
    return packed


def _check_sizes(w13: PackedWeight, w2: PackedWeight, hidden: fx.Node, up: ExpertGemm, top_k: int) -> None:
    if w13.format != w2.format:
        raise NoMatch("the projections are packed as {} and as {}", w13.format, w2.format, node=up.node)
    (experts, rows, columns), (experts_2, width, intermediate) = w13.shape, w2.shape
    if experts != experts_2 or columns != width or rows not in (intermediate, 2 * intermediate):
        raise NoMatch("weights {} and {} do not fit together", w13.shape, w2.shape, node=up.node)
    sizes = shape(hidden)
    if not same(sizes[-1], width) or not same(numel(hidden) * top_k, numel(up.order.ids) * width):
        raise NoMatch("{} is not one row of {} for every token", hidden.name, width, node=hidden)
