"""Near twins of routers: refused, or told apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from fp4_inductor.patterns.router import identify_router
from fp4_inductor.patterns.signature import Memo
from router_spellings import (
    BIAS,
    E,
    K,
    Routed,
    Tensor,
    biased_logits,
    found,
    grouped,
    hashed,
    sigmoid_bias,
    softmax_topk_renorm,
    sparsemixer,
    spec_of,
    traced,
    with_null,
)

from fp4_inductor.matching import NoMatch


def biased_weights(logits: Tensor, bias: Tensor) -> Routed:
    weights, ids = (logits.sigmoid() + bias).topk(K, -1)
    return ids, weights / weights.sum(-1, keepdim=True)


def bias_in_scores(logits: Tensor, bias: Tensor) -> Routed:
    ids = (logits + bias).topk(K, -1).indices
    return ids, (logits.gather(1, ids) + 0.5 * bias[ids]).sigmoid()


def clamped_weights(logits: Tensor, bias: Tensor) -> Routed:
    ids, weights = sigmoid_bias(logits, bias)
    return ids, weights.clamp_min(1e-12)


def floor_then_eps(logits: Tensor, bias: Tensor) -> Routed:
    scores = logits.sigmoid()
    ids = (scores + bias).topk(K, -1).indices
    weights = scores.gather(1, ids)
    return ids, weights / (weights.sum(-1, keepdim=True) - 1e-6).clamp_min(1e-6)


def eps_in_every_weight(logits: Tensor, bias: Tensor) -> Routed:
    scores = logits.sigmoid()
    ids = (scores + bias).topk(K, -1).indices
    weights = scores.gather(1, ids) + 1e-6
    return ids, weights / weights.sum(-1, keepdim=True)


def small_weights_dropped(logits: Tensor, bias: Tensor) -> Routed:
    ids, weights = sigmoid_bias(logits, bias)
    return ids, torch.where(weights < 0.1, 0.0, weights)


def one_group_too_many(logits: Tensor, bias: Tensor) -> Routed:
    weights = grouped(logits, bias)[1]
    other = grouped(logits, bias, kept=3)[0]
    return other, weights


def best_of_three_in_a_group(logits: Tensor, bias: Tensor) -> Routed:
    return grouped(logits, bias, best=3)


def groups_filled_below(logits: Tensor, bias: Tensor) -> Routed:
    return grouped(logits, bias, fill=float(bias.numel()))


def least_experts(logits: Tensor, bias: Tensor) -> Routed:
    ids = (logits.sigmoid() + bias).topk(K, -1, largest=False).indices
    return ids, logits.sigmoid().gather(1, ids)


def unlike_slots(logits: Tensor, bias: Tensor) -> Routed:
    ids, weights = sigmoid_bias(logits, bias)
    return ids, weights.flip(-1)


def joint_softmax(logits: Tensor, bias: Tensor) -> Routed:
    extended = torch.cat((logits, torch.zeros_like(logits[:, :1])), -1).softmax(-1)
    weights, ids = extended[:, :-1].topk(K, -1)
    return ids, weights + 0 * bias[:K]


def scaled_by_slot(logits: Tensor, bias: Tensor) -> Routed:
    ids, weights = softmax_topk_renorm(logits)
    return ids, weights * bias[:K]


def scaled_by_another_expert(logits: Tensor, bias: Tensor) -> Routed:
    ids, weights = softmax_topk_renorm(logits)
    return ids, weights * bias[ids.flip(-1)]


def scaled_before_the_sum(logits: Tensor, bias: Tensor) -> Routed:
    ids, weights = softmax_topk_renorm(logits)
    weights = weights * bias[ids]
    return ids, weights / weights.sum(-1, keepdim=True)


def temperature(logits: Tensor, bias: Tensor) -> Routed:
    ids = logits.topk(K, -1).indices
    return ids, (logits.gather(1, ids) / 1.1).softmax(-1) + 0 * bias[:K]


@pytest.mark.parametrize(
    "fn",
    [biased_weights, bias_in_scores, clamped_weights, floor_then_eps, eps_in_every_weight, small_weights_dropped,
     one_group_too_many, best_of_three_in_a_group, groups_filled_below, least_experts, unlike_slots, joint_softmax,
     scaled_by_slot, scaled_by_another_expert, scaled_before_the_sum, temperature],
    ids=lambda fn: fn.__name__,
)  # fmt: skip
def test_twins_are_refused(fn: Callable[..., Routed]) -> None:
    with pytest.raises(NoMatch):
        found(fn, BIAS)


def dense_softmax_after_sparse(logits: Tensor) -> Routed:
    ids, weights = sparsemixer(logits)
    return ids, torch.cat((weights[:, :1], logits.softmax(-1).gather(1, ids[:, 1:])), -1)


def nearness_by_difference(logits: Tensor) -> Routed:
    best, ids = logits.topk(K, -1)
    far = best[:, :1] - logits > 0.02
    return ids, logits.masked_fill(far, float("-inf")).softmax(-1).gather(1, ids)


@pytest.mark.parametrize("fn", [dense_softmax_after_sparse, nearness_by_difference], ids=lambda fn: fn.__name__)
def test_twins_of_the_sparsemixer_are_refused(fn: Callable[..., Routed]) -> None:
    with pytest.raises(NoMatch):
        found(fn)


def shared_first(logits: Tensor, bias: Tensor) -> Routed:
    routed, shared = logits[:, 2:], logits[:, :2]
    ids = (routed.sigmoid() + bias).topk(K, -1).indices
    weights = routed.gather(1, ids).sigmoid()
    return ids, weights / (weights.sum(-1, keepdim=True) + shared.sigmoid().sum(-1, keepdim=True))


def half_of_the_shared(logits: Tensor, bias: Tensor) -> Routed:
    ids = (logits[:, :E].sigmoid() + bias).topk(K, -1).indices
    weights = logits.gather(1, ids).sigmoid()
    return ids, weights / (weights.sum(-1, keepdim=True) + logits[:, -1:].sigmoid())


@pytest.mark.parametrize("fn", [shared_first, half_of_the_shared], ids=lambda fn: fn.__name__)
def test_twins_with_shared_experts_are_refused(fn: Callable[..., Routed]) -> None:
    with pytest.raises(NoMatch):
        found(fn, BIAS, columns=E + 2)


def null_keeps_its_weight(logits: Tensor, bias: Tensor) -> Routed:
    scores = logits.softmax(-1)
    ids = (scores + bias).topk(K, -1).indices
    return ids.masked_fill(ids == E, 0), scores.gather(-1, ids)


def null_goes_to_the_last_expert(logits: Tensor, bias: Tensor) -> Routed:
    ids, weights = with_null(logits, bias)
    return ids.masked_fill(weights == 0, E - 1), weights


@pytest.mark.parametrize("fn", [null_keeps_its_weight, null_goes_to_the_last_expert], ids=lambda fn: fn.__name__)
def test_twins_with_null_experts_are_refused(fn: Callable[..., Routed]) -> None:
    with pytest.raises(NoMatch):
        found(fn, torch.randn(E + 1), columns=E + 1)


def test_ids_that_come_from_the_logits_are_not_given() -> None:
    """An unknown choice of experts stays unknown, however their weights are scored."""
    with pytest.raises(NoMatch):
        found(lambda logits: ((ids := logits.sin().topk(K).indices), logits.sigmoid().gather(1, ids)))

    def by_another_product(logits: Tensor, hidden: Tensor, weight: Tensor) -> Routed:
        ids = (hidden @ weight).topk(K).indices
        return ids, logits.sigmoid().gather(1, ids)

    with pytest.raises(NoMatch):
        found(by_another_product, torch.randn(6, 8), torch.randn(8, E))


def hashed_and_weighed_elsewhere(logits: Tensor, table: Tensor, tokens: Tensor) -> Routed:
    ids = table[tokens]
    weights = logits.sigmoid().gather(1, (ids + 1) % E)
    return ids, weights


def hashed_by_a_limit(logits: Tensor, table: Tensor, tokens: Tensor) -> Routed:
    ids, weights = hashed(logits, table, tokens)
    return ids, weights.masked_fill(tokens[:, None] > 40, 0.0)


@pytest.mark.parametrize("fn", [hashed_and_weighed_elsewhere, hashed_by_a_limit], ids=lambda fn: fn.__name__)
def test_twins_of_ids_from_a_table_are_refused(fn: Callable[..., Routed]) -> None:
    with pytest.raises(NoMatch):
        found(fn, torch.rand(50, E).topk(K).indices, torch.randint(0, 50, (6,)))


def test_equal_nodes_in_other_roles_share_no_memo_entry() -> None:
    memo = Memo()
    table, tokens = torch.rand(50, E).topk(K).indices, torch.randint(0, 50, (6,))
    spellings: list[tuple[Callable[..., Routed], tuple[Tensor, ...]]] = [
        (lambda logits, bias: sigmoid_bias(logits, bias, scale=1.0), (BIAS,)),
        (lambda logits, bias: sigmoid_bias(logits, bias, scale=1.0, eps=1e-6), (BIAS,)),
        (lambda logits, bias: sigmoid_bias(logits, bias, scale=1.0, floor=1e-6), (BIAS,)),
        (biased_logits, (BIAS,)),
        (hashed, (table, tokens)),
        (lambda logits, table, tokens: hashed(F.softplus(logits), table, tokens), (table, tokens)),
    ]
    for _ in range(2):
        for fn, inputs in spellings:
            ids, weights = traced(fn, *inputs)
            assert identify_router(ids, weights, E, K, memo).spec == spec_of(fn, *inputs)
