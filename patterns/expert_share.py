"""Which share of a block one expert of a loop has: the tokens it runs on, and the weights of its results."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from ..matching import NoMatch
from .expert_chain import Chain
from .graph_tools import arguments, aten, inputs, is_call, is_zero, same, shape, source
from .picked import Value, product, same_rows
from .picks import Picks, picked_rows
from .rows import matrix


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """What expert ``expert`` takes.

    Attributes:
        hidden: ``[T, H]``; ids and weights ``[T, k]``.
        distinct: the rows are those of a mixture only if the ids of a token differ.
        nodes: the steps that pick rows.
    """

    chain: Chain
    expert: int
    hidden: fx.Node
    ids: fx.Node
    weights: fx.Node
    distinct: bool
    nodes: frozenset[fx.Node]


def read_share(chain: Chain, picks: Picks, stacked: Value | None) -> ExpertShare:
    """Read which rows an expert takes and how they are weighted.

    Args:
        stacked: the scores that a stack of all results is summed with.

    Raises:
        NoMatch: not those whose ids name one expert, with their routing weights.
    """
    node = chain.joint.node
    score = _score(chain, picks, stacked)
    hidden, rows, nodes = _dispatched(chain, picks)
    if score.kind != "score" or score.expert is None or score.ids is None or score.weights is None:
        raise NoMatch("rows of {} are not scaled by the routing weights of one expert", chain.down.node, node=node)
    if chain.joint.indices is None:
        if rows is not None or score.rows is not None or score.named not in (("tokens",), ("batch", "tokens")):
            raise NoMatch("{} adds rows of some tokens to those of all", node, node=node)
        return ExpertShare(chain, score.expert, hidden, score.ids, score.weights, score.distinct, nodes)
    mask, along, place = picked_rows(picks, list(chain.joint.indices), node)
    if place or along != ("tokens",):
        raise NoMatch("{} does not add rows to their tokens", node, node=node)
    if rows is None or score.rows is None or not same_rows(rows, mask) or score.named != ("rows",):
        raise NoMatch("{} does not add rows to the tokens they were read from", node, node=node)
    if not same_rows(score.rows, mask):
        raise NoMatch("{} scales rows by the weights of others", node, node=node)
    if (mask.expert, mask.ids) != (score.expert, score.ids):
        raise NoMatch("{} adds rows of one expert with the weights of another", node, node=node)
    distinct = score.distinct or mask.distinct or (mask.kind == "match" and not chain.joint.repeats)
    return ExpertShare(chain, score.expert, hidden, score.ids, score.weights, distinct, nodes)


def _score(chain: Chain, picks: Picks, stacked: Value | None) -> Value:
    """The product of what scales an expert's rows."""
    if stacked is not None:
        if chain.factors:
            raise NoMatch("results of {} are scaled before scores scale them", chain.down.node, node=chain.factors[0])
        return replace(stacked, axes=("tokens",), expert=chain.joint.place)
    found: Value | None = None
    for node in chain.factors:
        read = _mask_of(node, picks) if is_call(node, *_CHOICES) else picks.read(node)
        found = read if found is None else product(found, read, node)
    if found is None:
        raise NoMatch("rows of {} are summed without routing weights", chain.down.node, node=chain.joint.node)
    return found


_CHOICES = (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.masked_fill.Scalar)


def _mask_of(node: fx.Node, picks: Picks) -> Value:
    """The mask where ``node`` chooses between an expert's rows and zeros."""
    if is_call(node, aten.masked_fill.Scalar):
        mask, if_true, if_false = inputs(node, "mask", "value", "self")
    else:
        mask, if_true, if_false = inputs(node, "condition", "self", "other")
    read = picks.mask(mask)
    kept, fill = (if_false, if_true) if read.negated else (if_true, if_false)
    if not is_zero(fill) or not isinstance(kept, fx.Node):
        raise NoMatch("{} does not choose between an expert's rows and zeros", node.name, node=node)
    return replace(read, negated=False)


def _dispatched(chain: Chain, picks: Picks) -> tuple[fx.Node, Value | None, frozenset[fx.Node]]:
    """The hidden states, the mask whose rows of them the expert reads (None: all), and the steps between."""
    first = source(chain.ups[0].rows)
    nodes: set[fx.Node] = set()
    found: list[tuple[fx.Node, Value | None]] = []
    for up in chain.ups:
        rows = source(up.rows)
        if chain.joint.indices is None or not is_call(rows, aten.index.Tensor, aten.index_select.default):
            found.append((matrix(up.rows), None))
            continue
        args = arguments(rows)
        base = args["self"]
        indices = list(args["indices"]) if "indices" in args else [None] * args["dim"] + [args["index"]]
        mask, along, place = picked_rows(picks, indices, rows)
        if along != ("tokens",) or not all(same(size, 1) for size in shape(base)[:place]):
            raise NoMatch("{} does not read rows of tokens", rows, node=rows)
        nodes.add(rows)
        found.append((matrix(source(base)) if len(shape(base)) != 2 else base, mask))
    if found[0] != found[-1]:
        raise NoMatch("{} and {} read other rows", first, source(chain.ups[-1].rows), node=first)
    return (*found[0], frozenset(nodes))
