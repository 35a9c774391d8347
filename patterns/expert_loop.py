"""Loops over experts that a graph holds unrolled: every expert has GEMMs of its own, and their rows are summed.

An expert runs on the tokens whose ids name it (``torch.where(ids == e)``, a mask, a one-hot row), or on all
tokens with a weight that is zero for the others. Which expert it is, is what ids are compared with.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import fx

from ..matching import Assembled, NoMatch, PackedWeight, Source
from ..spec import Operand
from .activation import IdentifiedActivation, identify_activation
from .block import Block, Candidate, Feed
from .dequantize import identify_expert
from .expert_chain import Chain, Linear, first_layers, group_by_sum, read_chain, read_linear, starts_from_nothing
from .expert_share import ExpertShare, read_share
from .expert_stack import StackSum, read_stack
from .graph_tools import dtype, inputs, is_call, narrowed, numel, same, shape, source, stage
from .near_misses import Misses
from .picks import Picks
from .probing import cone
from .rows import is_choice
from .signature import Memo
from .weights import Bound, check_fit, join_halves, stack_experts

NAME = "expert_loop"


def candidates(gemms: Sequence[fx.Node], misses: Misses) -> Iterator[Candidate]:
    """Every sum of rows that go through two or three GEMMs of one weight each."""
    linears = {node: linear for node in gemms if (linear := read_linear(node)) is not None}
    chains: list[Chain] = []
    for node, ups in first_layers(linears).items():
        try:
            chains.append(read_chain(ups, linears[node]))
        except NoMatch as miss:
            miss.progress = max(miss.progress, 0.25)
            for layer in (*ups, linears[node]):
                misses.keep(NAME, miss, layer.node)
    for group, start in group_by_sum(chains):
        nodes = tuple(gemm for chain in group for gemm in chain.gemms)
        yield Candidate(NAME, nodes, partial(read_expert_loop, group, start))


def read_expert_loop(chains: Sequence[Chain], start: object, memo: Memo) -> Block:
    """Read the block whose experts are ``chains``, summed from ``start`` on.

    Raises:
        NoMatch: something is not as in a mixture-of-experts block.
    """
    picks = Picks()
    with stage(0.4):
        if not starts_from_nothing(start):
            raise NoMatch("experts are added to {}, not to zeros", start, node=chains[0].joint.node)
        total = _total(chains, picks)
        shares = _in_order([read_share(chain, picks, total.score) for chain in chains], picks)
        hidden, ids, weights = _common(shares)
        _check_tokens(hidden, ids, weights, shares, len(shares))
    with stage(0.5):
        ordered = [share.chain for share in shares]
        w13 = join_halves([_stacked([chain.ups[half] for chain in ordered], memo) for half in _halves(ordered)])
        w2 = _stacked([chain.down for chain in ordered], memo)
        check_fit(w13, w2, ordered[0].down.node)
        if not same(shape(hidden)[-1], w2.shape[1]):
            raise NoMatch("{} is not one row of {} for every token", hidden.name, w2.shape[1], node=hidden)
    with stage(0.6):
        activation = _common_activation(ordered, w2.shape[2], memo)
    output = narrowed(total.output)
    biases = [[up.bias for up in chain.ups] for chain in ordered]
    steps = [share.nodes for share in shares] + [_between(chain, activation) for chain in ordered]
    return Block(
        form=NAME,
        hidden=hidden,
        ids=ids,
        weights=weights,
        weights_dtype=dtype(weights),
        top_k=_top_k(ids),
        w13=w13,
        w2=w2,
        w13_bias=_stacked_biases([[bias[half] for bias in biases] for half in _halves(ordered)]),
        w2_bias=_stacked_biases([[chain.down.bias for chain in ordered]]),
        k_first=ordered[0].down.k_first,
        activation=activation.spec,
        order=activation.order,
        scalars=dict(activation.scalars),
        output=output,
        feeds={
            hidden: Feed(Operand.HIDDEN),
            ids: Feed(Operand.TOPK_IDS),
            weights: Feed(Operand.TOPK_WEIGHTS),
            **{node: feed for expert, chain in enumerate(ordered) for node, feed in _feeds(chain, expert)},
            **{node: Feed(operand) for operand, node in activation.scalars.items()},
        },
        explained=frozenset(picks.values).union({output}, total.nodes, *steps),
        masked=not picks.experts,
        repeats=not any(share.distinct for share in shares),
    )


def _in_order(shares: Sequence[ExpertShare], picks: Picks) -> list[ExpertShare]:
    """By expert: each from 0 to E - 1 once.

    Raises:
        NoMatch: one is missing, or there twice.
    """
    found = sorted(shares, key=lambda share: share.expert)
    numbers = [share.expert for share in found]
    if numbers != list(range(len(numbers))) or not picks.experts <= {len(numbers)}:
        total = max(picks.experts, default=max(numbers) + 1)
        raise NoMatch("the sum is over experts {} of {}", numbers, total, node=found[0].chain.down.node)
    return found


def _common(shares: Sequence[ExpertShare]) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Hidden states, ids and weights, which all experts must share."""
    first = shares[0]
    hidden = {share.hidden for share in shares}
    base = first.hidden if len(hidden) == 1 else source(first.hidden)
    for share in shares:
        pairs = ((base, source(share.hidden)), (first.ids, share.ids), (first.weights, share.weights))
        for what, (one, other) in zip(("hidden states", "ids", "weights"), pairs, strict=True):
            if one is not other and source(one) is not other:
                numbers = (first.expert, share.expert)
                raise NoMatch("experts {} and {} read {} {} and {}", *numbers, what, one, other, node=other)
    return base, first.ids, first.weights


def _top_k(ids: fx.Node) -> int:
    sizes = shape(ids)
    top_k = sizes[-1] if len(sizes) > 1 else 1
    if not isinstance(top_k, int):
        raise NoMatch("expert ids {} are not [T, k] with a constant k", ids.name, node=ids)
    return top_k


def _check_tokens(hidden: fx.Node, ids: fx.Node, weights: fx.Node, shares: Sequence[ExpertShare], experts: int) -> None:
    top_k = _top_k(ids)
    width = shape(hidden)[-1]
    if not same(numel(hidden) * top_k, numel(ids) * width) or not same(numel(weights), numel(ids)):
        found = [(node.name, tuple(shape(node))) for node in (hidden, ids, weights)]
        raise NoMatch(
            "hidden states {} {}, ids {} {} and weights {} {} are not known to have as many tokens; "
            "torch._check(ids.shape[0] == hidden.shape[0]), and so for weights, tells it to the compiler",
            *itertools.chain(*found),
            node=ids,
        )
    if any(share.distinct for share in shares) and not is_choice(source(ids), experts):
        raise NoMatch("an id that a token has twice would count once; {} is no top-k over experts", ids, node=ids)
    total = _choices(source(ids))
    if total is not None and not same(total, experts):
        raise NoMatch("{} chooses among {} experts, the sum is over {}", ids.name, total, experts, node=ids)


def _choices(ids: fx.Node) -> object:
    """How many experts ids are chosen from, where they come from a top-k."""
    if ids.args and is_call(ids.args[0], torch.ops.aten.topk.default):
        scores, dim = inputs(ids.args[0], "self", "dim")  # type: ignore[arg-type]
        return shape(scores)[dim]
    return None


def _halves(chains: Sequence[Chain]) -> range:
    counts = {len(chain.ups) for chain in chains}
    if len(counts) != 1:
        raise NoMatch("some experts have gate and up apart, others do not", node=chains[0].down.node)
    return range(counts.pop())


def _stacked(layers: Sequence[Linear], memo: Memo) -> PackedWeight:
    """The weights of all experts, whose blocks must lie along the axis that the GEMMs sum over.

    Raises:
        NoMatch: two experts have one weight, or one has that of another.
    """
    found = [identify_expert(layer.weight, memo) for layer in layers]
    for expert, (layer, weight) in enumerate(zip(layers, found, strict=True)):
        if layer.k_first != layers[0].k_first or weight.transposed != layer.k_first:
            raise NoMatch("{} sums over an axis that its scales do not run along", layer.node.name, node=layer.node)
        if weight.index not in (None, expert):
            raise NoMatch("{} has weight {} of expert {}", layer.node.name, weight.index, expert, node=layer.node)
    if found[0].index is None and len({weight.codes for weight in found}) != len(found):
        raise NoMatch("two experts have one weight", node=layers[0].node)
    return stack_experts(found)


def _stacked_biases(halves: Sequence[Sequence[fx.Node | None]]) -> Source | None:
    """The biases ``[E, N]``, experts of each half given; None where there are none."""
    parts = [bias for half in halves for bias in half]
    present = tuple(bias for bias in parts if bias is not None)
    if not present:
        return None
    if len(present) != len(parts):
        raise NoMatch("some linear layers of the experts have a bias, others do not", node=present[0])
    return Assembled(Bound(stacked_rows, (len(halves),)), present)


def stacked_rows(halves: int, *vectors: torch.Tensor) -> torch.Tensor:
    """``[N]`` of every expert, first those of the first half, to ``[E, halves * N]``."""
    count = len(vectors) // halves
    return torch.cat([torch.stack(vectors[i : i + count]) for i in range(0, len(vectors), count)], dim=1)


def _common_activation(chains: Sequence[Chain], intermediate: int, memo: Memo) -> IdentifiedActivation:
    found = [
        identify_activation(source(chain.down.rows), tuple(up.out for up in chain.ups), intermediate, memo)
        for chain in chains
    ]
    for chain, other in zip(chains, found, strict=True):
        if other != found[0]:
            names = (found[0].spec, found[0].order, other.spec, other.order)
            raise NoMatch("expert activations differ: {} {} and {} {}", *names, node=chain.down.node)
    return found[0]


def _between(chain: Chain, activation: IdentifiedActivation) -> frozenset[fx.Node]:
    """The steps from the first GEMMs to the last, and those of the layers themselves."""
    inner = cone([chain.down.rows], [*(up.out for up in chain.ups), *activation.scalars.values()])
    return frozenset(inner).union(chain.nodes, *(layer.nodes for layer in (*chain.ups, chain.down)))


def _feeds(chain: Chain, expert: int) -> Iterator[tuple[fx.Node, Feed]]:
    for half, up in enumerate(chain.ups):
        part = half if len(chain.ups) == 2 else None
        yield up.weight, Feed(Operand.W13, expert, part, up.k_first)
        if up.bias is not None:
            yield up.bias, Feed(Operand.W13_BIAS, expert, part)
    yield chain.down.weight, Feed(Operand.W2, expert, None, chain.down.k_first)
    if chain.down.bias is not None:
        yield chain.down.bias, Feed(Operand.W2_BIAS, expert)


def _total(chains: Sequence[Chain], picks: Picks) -> StackSum:
    """The sum over experts: the last of a row of additions, or what a stack of their results ends in."""
    ends = {chain.joint.node for chain in chains}
    for chain in chains:
        if isinstance(chain.joint.before, fx.Node):
            ends.discard(source(chain.joint.before))
    (end,) = ends
    if any(chain.joint.place is not None for chain in chains):
        return read_stack(end, len(chains), picks, weighted=bool(chains[0].factors))
    return StackSum(end, None, frozenset())
