"""The numeric reading of a whole block: run the region as it is written and compare with what its spec means.

Nothing here knows how a block is spelled. The region is cut at the operands, run in float64 on random
values, and compared with a mixture of experts written down directly from the spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import fx

from ..matching import NoMatch
from ..reference import activate, resolve_scalars
from ..spec import ActivationSpec, Operand
from .block import Block, Feed
from .graph_tools import shape
from .miniature import Miniature, Sizes, miniature, small_symbols
from .probing import cone, evaluate, isolated, size_hint
from .signature import Memo, signature

_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Regime:
    """One kind of values. What only shows at some amplitude, weight or load is tried there."""

    amplitude: float
    weights: Literal["usual", "tiny", "signed"]
    ids: Literal["distinct", "crowded", "outside", "repeated"]


REGIMES = (
    Regime(1.0, "usual", "distinct"),
    Regime(0.05, "tiny", "crowded"),
    Regime(12.0, "signed", "distinct"),
    Regime(100.0, "usual", "crowded"),
)
MASKED = (Regime(1.0, "signed", "outside"), Regime(12.0, "usual", "outside"))
"""Also tried where a graph zeroes the rows of no expert."""
REPEATED = (Regime(1.0, "signed", "repeated"),)
"""Also tried where a token may have an expert twice."""


def prove(block: Block, memo: Memo) -> None:
    """Refuse a block that does not compute what was read. Equal regions that were read alike are run once.

    Raises:
        NoMatch: the region computes something else, or cannot be run.
    """
    (_, _, width), (experts, _, intermediate) = block.w13.shape, block.w2.shape
    symbols = small_symbols(block.feeds)
    tokens = prod(size_hint(size, symbols) for size in shape(block.hidden)[:-1])
    branches = {"E": experts, "k": block.top_k}.get(block.branches, 0)
    sizes = Sizes(tokens, block.top_k, experts, width, intermediate, branches)
    nodes = [*block.feeds, *cone([block.output], block.feeds)]
    read = (block.activation, block.order, block.masked, block.weight_on_input, block.repeats)
    key = ("block", signature(nodes, inputs=len(block.feeds)), tuple(map(str, block.feeds.values())), sizes, read)
    memo.get(key, lambda: _prove(block, miniature(block.output, block.feeds, sizes, symbols)))


def _prove(block: Block, small: Miniature) -> bool:
    for seed, regime in enumerate((*REGIMES, *(MASKED if block.masked else ()), *(REPEATED if block.repeats else ()))):
        for scale in (1.0, 0.25) if block.scalars else (1.0,):
            _compare(block, small, regime, scale, seed)
    return True


def _compare(block: Block, small: Miniature, regime: Regime, scale: float, seed: int) -> None:
    with isolated():
        values = _values(block, small.sizes, regime, scale, seed)
        fed = {node: _as_fed(feed, values, node) for feed, node in small.feeds.items()}
        (got,) = evaluate([small.output], fed)
        want = mixture(values, resolve_scalars(block.activation, values), block)
        got = got.reshape(want.shape)
        scale_of_row = want.abs().amax(dim=-1, keepdim=True).clamp_min(want.abs().max() * 1e-6)
        error = float(((got - want).abs() / scale_of_row).max())
    if not error <= _TOLERANCE:
        raise NoMatch(
            "the block does not compute what was read: it differs by {:.2g} with {}", error, regime, node=block.output
        )


def _values(block: Block, sizes: Sizes, regime: Regime, scale: float, seed: int) -> dict[Operand, torch.Tensor]:
    """Random operands, float64, weights as ``[E, N, K]``."""
    generator = torch.Generator().manual_seed(seed)
    tokens, width, inner = sizes.tokens, sizes.hidden, sizes.intermediate
    rows = 2 * inner if block.activation.gated else inner

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    values = {
        Operand.HIDDEN: normal(tokens, width) * regime.amplitude,
        Operand.TOPK_IDS: _ids(regime, tokens, sizes, generator),
        Operand.TOPK_WEIGHTS: _weights(regime, normal(tokens, sizes.top_k)),
        Operand.W13: normal(sizes.experts, rows, width) / width**0.5,
        Operand.W2: normal(sizes.experts, width, inner) / inner**0.5,
        Operand.W13_BIAS: normal(sizes.experts, rows) * regime.amplitude,
        Operand.W2_BIAS: normal(sizes.experts, width) * regime.amplitude,
        Operand.ALPHA: torch.tensor(1.37 * scale, dtype=torch.float64),
        Operand.BETA: torch.tensor(0.81 * scale, dtype=torch.float64),
        Operand.LIMIT: torch.tensor(2.3 * scale, dtype=torch.float64),
        Operand.UP_LIMIT: torch.tensor(1.9 * scale, dtype=torch.float64),
    }
    read = {Operand.TOPK_IDS, *(feed.operand for feed in block.feeds.values())}
    return {operand: values[operand] for operand in read}


def _ids(regime: Regime, tokens: int, sizes: Sizes, generator: torch.Generator) -> torch.Tensor:
    """Ids ``[T, k]``; "crowded" sends many rows to one expert and none to some others, "outside" some to no expert."""
    scores = torch.rand(tokens, sizes.experts, generator=generator)
    if regime.ids == "crowded":
        scores[:, sizes.experts // 2] += 1
        scores[:, 0] -= 1
    ids = scores.topk(sizes.top_k, dim=-1).indices
    if regime.ids == "repeated":
        ids[::2] = ids[::2, :1]
    if regime.ids == "outside":
        dropped = torch.rand(ids.shape, generator=generator) < 0.4
        dropped[0, :1], dropped[0, 1:] = False, True
        dropped[1:2] = True  # a token that no expert serves
        beyond = torch.randint(sizes.experts, 2 * sizes.experts + 1, ids.shape, generator=generator)
        beyond[0] = sizes.experts
        ids = torch.where(dropped, beyond, ids)
    return ids


def _weights(regime: Regime, normal: torch.Tensor) -> torch.Tensor:
    if regime.weights == "tiny":
        return normal.abs() * 1e-4
    return normal * 3 if regime.weights == "signed" else torch.softmax(normal, dim=-1)


def _as_fed(feed: Feed, values: Mapping[Operand, torch.Tensor], node: fx.Node) -> torch.Tensor:
    """The part of an operand that ``node`` holds, as the graph has it."""
    value = values[feed.operand]
    if feed.spread:
        matrix = value.new_zeros(value.shape[0], node.meta["val"].shape[-1])
        value = matrix.scatter_add(1, values[Operand.TOPK_IDS], value)
    if feed.half is not None:
        value = value.chunk(2, dim=1)[feed.half]
    if feed.expert is not None:
        value = value[feed.expert]
    if feed.k_first:
        value = value.mT
    if feed.operand is Operand.TOPK_IDS:
        value = value.to(node.meta["val"].dtype)
    return value.reshape(node.meta["val"].shape)


def mixture(values: Mapping[Operand, torch.Tensor], activation: ActivationSpec, block: Block) -> torch.Tensor:
    """A mixture of experts, every slot's product written out; slots with ids beyond the last expert's add nothing.

    Args:
        values: hidden ``[T, H]``, ids and weights ``[T, k]``, W13 ``[E, N, H]``, W2 ``[E, H, I]``, biases
            ``[E, N]`` and ``[E, H]`` where there are any.

    Returns:
        ``[T, H]`` in the dtype of the values.
    """
    ids = values[Operand.TOPK_IDS].long()
    served = ids < block.w13.shape[0]
    weights = values[Operand.TOPK_WEIGHTS].where(served, 0)
    ids = ids.where(served, 0)
    hidden = values[Operand.HIDDEN].unsqueeze(1).expand(*ids.shape, -1)
    if block.weight_on_input:
        hidden, weights = hidden * weights.unsqueeze(-1), torch.ones_like(weights)
    gate_up = torch.einsum("tknh,tkh->tkn", values[Operand.W13][ids], hidden)
    if Operand.W13_BIAS in values:
        gate_up = gate_up + values[Operand.W13_BIAS][ids]
    inner = activate(gate_up, activation, block.order)
    out = torch.einsum("tkhi,tki->tkh", values[Operand.W2][ids], inner)
    if Operand.W2_BIAS in values:
        out = out + values[Operand.W2_BIAS][ids]
    return (out * weights.unsqueeze(-1)).sum(dim=1)
