"""Routers that must be recognised, and what their specs say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fp4_inductor.patterns.router import identify_router, router_reference
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
    scaled_by_expert,
    sigmoid_bias,
    softmax_bias,
    softmax_topk,
    softmax_topk_renorm,
    sparsemixer,
    spec_of,
    sqrt_softplus,
    topk_sigmoid,
    topk_softmax,
    traced,
    with_null,
    with_shared,
)

from fp4_inductor.matching import Assembled
from fp4_inductor.spec import RUNTIME, Operand, RouterSpec, Scoring

SOFTMAX, SIGMOID, SQRT_SOFTPLUS = Scoring.SOFTMAX, Scoring.SIGMOID, Scoring.SQRT_SOFTPLUS
GROUPED = RouterSpec(
    SIGMOID, has_bias=True, num_groups=4, topk_groups=2, renormalize=True, renormalize_eps=1e-20, scaling_factor=2.5
)
BIASED = RouterSpec(SIGMOID, has_bias=True, renormalize=True, renormalize_eps=1e-20, scaling_factor=2.5)
TABLE, TOKENS = torch.rand(50, E).topk(K).indices, torch.randint(0, 50, (6,))


def name_of(value: object) -> str | None:
    return getattr(value, "__name__", None) if callable(value) else None


@pytest.mark.parametrize("tokens", [1, 6, 2048])
@pytest.mark.parametrize(
    ("fn", "spec"),
    [(softmax_topk, RouterSpec(SOFTMAX)), (softmax_topk_renorm, RouterSpec(SOFTMAX, renormalize=True)),
     (topk_softmax, RouterSpec(SOFTMAX, topk_before_scoring=True)),
     (topk_sigmoid, RouterSpec(SIGMOID, topk_before_scoring=True)),
     (sparsemixer, RouterSpec(Scoring.SPARSEMIXER, sparsity_threshold=0.02))],
    ids=name_of,
)  # fmt: skip
def test_routers_of_logits_alone(fn: Callable[..., Routed], spec: RouterSpec, tokens: int) -> None:
    router = found(fn, tokens=tokens)
    assert router.spec == spec
    assert set(router.operands) == {Operand.ROUTER_LOGITS}
    assert router.operands[Operand.ROUTER_LOGITS].op == "placeholder"


@pytest.mark.parametrize("tokens", [1, 6, 2048])
@pytest.mark.parametrize(
    ("fn", "spec"),
    [(sigmoid_bias, BIASED), (grouped, GROUPED),
     (sqrt_softplus, RouterSpec(SQRT_SOFTPLUS, has_bias=True, renormalize=True, scaling_factor=1.5)),
     (softmax_bias, RouterSpec(SOFTMAX, has_bias=True, renormalize=True, renormalize_min=1e-12)),
     (biased_logits, RouterSpec(SIGMOID, topk_before_scoring=True, has_bias=True, renormalize=True))],
    ids=name_of,
)  # fmt: skip
def test_biases_that_only_select(fn: Callable[..., Routed], spec: RouterSpec, tokens: int) -> None:
    router = found(fn, BIAS, tokens=tokens)
    assert router.spec == spec
    assert set(router.operands) == {Operand.ROUTER_LOGITS, Operand.ROUTER_BIAS}


def test_scales_by_expert() -> None:
    router = found(scaled_by_expert, torch.rand(E))
    assert router.spec == RouterSpec(SOFTMAX, renormalize=True, has_expert_scale=True)
    assert set(router.operands) == {Operand.ROUTER_LOGITS, Operand.ROUTER_EXPERT_SCALE}


def test_bias_and_scales_by_expert_are_told_apart() -> None:
    def both(logits: Tensor, bias: Tensor, scales: Tensor) -> Routed:
        ids, weights = sigmoid_bias(logits, bias)
        return ids, weights * scales[ids]

    router = found(both, BIAS, torch.rand(E))
    inputs = list(router.operands[Operand.ROUTER_LOGITS].graph.find_nodes(op="placeholder"))
    assert [router.operands[o] for o in (Operand.ROUTER_BIAS, Operand.ROUTER_EXPERT_SCALE)] == inputs[1:]


def test_ids_from_a_table() -> None:
    router = found(hashed, TABLE, TOKENS)
    assert router.spec == RouterSpec(
        SQRT_SOFTPLUS, ids_given=True, renormalize=True, renormalize_eps=1e-20, scaling_factor=1.5
    )


def test_experts_that_always_run_count_in_the_sum() -> None:
    spec = spec_of(with_shared, BIAS, columns=E + 2)
    assert spec == RouterSpec(SIGMOID, has_bias=True, renormalize=True, num_shared_experts=2, scaling_factor=1.5)


def test_a_class_that_is_no_expert() -> None:
    assert spec_of(with_null, torch.randn(E + 1), columns=E + 1) == RouterSpec(
        SOFTMAX, has_bias=True, num_null_experts=1
    )


@pytest.mark.parametrize("eps", [0.0, 1e-20, 1e-6])
def test_what_is_added_to_the_sum(eps: float) -> None:
    assert spec_of(lambda logits, bias: sigmoid_bias(logits, bias, eps=eps), BIAS).renormalize_eps == eps


@pytest.mark.parametrize("floor", [1e-12, 1e-6])
def test_what_the_sum_is_at_least(floor: float) -> None:
    """Near twin: the same number added to the sum."""
    for fn in (lambda logits, bias: sigmoid_bias(logits, bias, floor=floor),
               lambda logits, bias: softmax_bias(logits, bias, floor=floor)):  # fmt: skip
        spec = spec_of(fn, BIAS)
        assert (spec.renormalize_min, spec.renormalize_eps) == (floor, 0.0)
    spec = spec_of(lambda logits, bias: softmax_bias(logits, bias, floor=0.0, eps=floor), BIAS)
    assert (spec.renormalize_min, spec.renormalize_eps) == (0.0, floor)


def test_groups() -> None:
    best = spec_of(lambda logits, bias: grouped(logits, bias, best=1), BIAS)
    assert (best.group_score, best.num_groups) == ("max", 4)
    assert spec_of(lambda logits, bias: grouped(logits, bias, kept=3), BIAS).topk_groups == 3


@pytest.mark.parametrize("fill", [float("-inf"), 0.0])
def test_what_masked_groups_are_filled_with(fill: float) -> None:
    """Positive scores hide it: a fill of zero wins over experts of negative bias."""
    assert spec_of(lambda logits, bias: grouped(logits, bias, fill=fill), BIAS).group_fill == fill


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_how_many_groups_are_kept_shows_where_others_win(kept: int) -> None:
    """Filled with zero, groups win over negative scores; were all of them alike, fewer kept ones would do as well."""
    spec = spec_of(lambda logits, bias: grouped(logits, bias, best=1, kept=kept, fill=0.0), BIAS)
    assert (spec.topk_groups, spec.group_score, spec.group_fill) == (kept, "max", 0.0)


@pytest.mark.parametrize("jitter", [0.01, 0.05])
def test_how_near_a_sparse_softmax_looks(jitter: float) -> None:
    assert spec_of(lambda logits: sparsemixer(logits, jitter)).sparsity_threshold == 2 * jitter


def test_scaling_factor_at_run_time() -> None:
    router = found(sigmoid_bias, BIAS, torch.tensor(2.5, dtype=torch.float64))
    assert router.spec.scaling_factor is RUNTIME
    assert router.operands[Operand.ROUTER_SCALE].op == "placeholder"


def test_a_scaling_factor_of_several_parts() -> None:
    def scaled(logits: Tensor, bias: Tensor, learned: Tensor) -> Routed:
        return with_shared(logits, bias, scale=1.5 * learned)

    router = found(scaled, BIAS, torch.ones(1), columns=E + 2)
    assert router.spec.scaling_factor is RUNTIME
    scale = router.operands[Operand.ROUTER_SCALE]
    assert isinstance(scale, Assembled)
    assert float(scale.function(torch.tensor([2.0]))) == 3.0


def test_dtype_of_scores() -> None:
    def low(logits: Tensor) -> Routed:
        weights, ids = logits.to(torch.bfloat16).softmax(-1).topk(K, -1)
        return ids, weights / weights.sum(-1, keepdim=True)

    assert spec_of(low).dtype == torch.bfloat16
    assert spec_of(softmax_topk).dtype == torch.float32


def selected_low(logits: Tensor, bias: Tensor) -> Routed:
    scores = logits.sigmoid()
    ids = (scores + bias).to(torch.bfloat16).topk(K, -1)[1]
    return ids, scores.gather(1, ids)


def chosen_by_low_logits(logits: Tensor) -> Routed:
    values, ids = logits.to(torch.bfloat16).topk(K, -1)
    return ids, values.float().softmax(-1)


def scaled_low(logits: Tensor) -> Routed:
    weights, ids = logits.softmax(-1).topk(K, -1)
    return ids, weights.to(torch.bfloat16) * 2.5


def passed_through_low(logits: Tensor) -> Routed:
    weights, ids = logits.softmax(-1).topk(K, -1)
    return ids, weights.to(torch.bfloat16).float()


@pytest.mark.parametrize("router", [selected_low, chosen_by_low_logits, scaled_low, passed_through_low])
def test_dtype_shows_where_anything_is_rounded(router: Callable[..., Routed]) -> None:
    others = (BIAS,) if router is selected_low else ()
    assert found(router, *others).spec.dtype == torch.bfloat16


def test_finished_weights_may_be_rounded() -> None:
    def finished(logits: Tensor) -> Routed:
        weights, ids = logits.to(torch.float32).softmax(-1).topk(K, -1)
        return ids, (weights / weights.sum(-1, keepdim=True) * 2.5).to(torch.bfloat16)

    assert spec_of(finished).dtype == torch.float32


def test_scores_of_all_experts_are_read_at_the_ids() -> None:
    """As llama4 keeps its weights: what no expert was chosen for is scored from minus infinity."""

    def scattered(logits: Tensor) -> Routed:
        values, ids = logits.topk(K, -1)
        return ids, torch.full_like(logits, float("-inf")).scatter(1, ids, values).sigmoid()

    ids, weights = traced(scattered)
    assert identify_router(ids, weights, E, K).spec == RouterSpec(SIGMOID, topk_before_scoring=True)


def test_softcapped_logits_are_cut_behind_the_cap() -> None:
    router = found(lambda logits: softmax_topk_renorm(torch.tanh(logits / 30) * 30))
    assert router.spec == RouterSpec(SOFTMAX, renormalize=True)
    assert router.operands[Operand.ROUTER_LOGITS].op == "call_function"


def by_amax_in_groups(logits: Tensor, bias: Tensor) -> Routed:
    scores = logits.softmax(-1)
    groups = (scores + bias).unflatten(-1, (4, -1))
    dropped = torch.ones(len(logits), 4, dtype=torch.bool).scatter(1, groups.amax(-1).topk(2)[1], False)
    ids = groups.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(1).topk(K)[1]
    return ids, scores.gather(1, ids) * 16.0


def by_product_with_a_mask(logits: Tensor) -> Routed:
    scores = logits.softmax(-1).view(-1, 4, E // 4)
    chosen = scores.topk(2, -1).values.sum(-1).topk(2).indices
    kept = F.one_hot(chosen, 4).sum(1).to(scores.dtype)
    weights, ids = (scores * kept.unsqueeze(-1)).flatten(1).topk(K, -1)
    return ids, weights


def by_norm(logits: Tensor) -> Routed:
    weights, ids = logits.softmax(-1).topk(K, -1)
    return ids, weights / torch.norm(weights, p=1, dim=-1, keepdim=True)


def by_normalize(logits: Tensor) -> Routed:
    weights, ids = logits.sigmoid().topk(K, -1)
    return ids, F.normalize(weights, p=1.0, dim=-1)


OTHER_SPELLINGS: dict[str, tuple[Callable[..., Routed], RouterSpec]] = {
    "sort": (lambda x: tuple(v[:, :K] for v in x.softmax(-1).sort(-1, descending=True))[::-1], RouterSpec(SOFTMAX)),
    "argsort": (
        lambda x: ((ids := x.argsort(-1, descending=True)[:, :K]), x.softmax(-1).gather(1, ids)),
        RouterSpec(SOFTMAX),
    ),
    "exponentials": (
        lambda x: ((ids := x.topk(K).indices), (x.exp() / x.exp().sum(-1, keepdim=True)).gather(1, ids)),
        RouterSpec(SOFTMAX),
    ),
    "log_softmax": (lambda x: (x.topk(K).indices, x.log_softmax(-1).topk(K).values.exp()), RouterSpec(SOFTMAX)),
    "reciprocal": (
        lambda x: ((ids := x.topk(K).indices), 1 / (1 + torch.exp(-x.gather(1, ids)))),
        RouterSpec(SIGMOID, topk_before_scoring=True),
    ),
    "amax": (
        by_amax_in_groups,
        RouterSpec(SOFTMAX, has_bias=True, num_groups=4, topk_groups=2, group_score="max", scaling_factor=16.0),
    ),
    "mask": (by_product_with_a_mask, RouterSpec(SOFTMAX, num_groups=4, topk_groups=2, group_fill=0.0)),
    "norm": (by_norm, RouterSpec(SOFTMAX, renormalize=True)),
    "normalize": (by_normalize, RouterSpec(SIGMOID, renormalize=True, renormalize_min=1e-12)),
}


@pytest.mark.parametrize("spelling", OTHER_SPELLINGS)
def test_other_spellings(spelling: str) -> None:
    fn, spec = OTHER_SPELLINGS[spelling]
    assert spec_of(fn, *[BIAS] * spec.has_bias) == spec


def test_one_expert_a_token() -> None:
    def greedy(logits: Tensor) -> Routed:
        weights, ids = logits.softmax(-1).max(-1, keepdim=True)
        return ids, weights

    assert identify_router(*traced(greedy), E, 1).spec == RouterSpec(SOFTMAX)


@pytest.mark.parametrize(
    ("spec", "text"),
    [(RouterSpec(SOFTMAX), "softmax→topk"), (RouterSpec(SOFTMAX, topk_before_scoring=True), "topk→softmax"),
     (GROUPED, "sigmoid→bias→groups(2/4 by top2)→topk→renorm(eps=1e-20)→scale(2.5)"),
     (RouterSpec(SIGMOID, has_bias=True, num_groups=4, topk_groups=1, group_score="max", group_fill=0.0),
      "sigmoid→bias→groups(1/4 by max fill 0)→topk"),
     (RouterSpec(SQRT_SOFTPLUS, has_bias=True, renormalize=True, renormalize_eps=1e-6, scaling_factor=0.5),
      "sqrt_softplus→bias→topk→renorm(eps=1e-06)→scale(0.5)"),
     (RouterSpec(SIGMOID, topk_before_scoring=True, has_bias=True), "bias→topk→sigmoid"),
     (RouterSpec(SOFTMAX, has_bias=True, renormalize=True, renormalize_min=1e-12),
      "softmax→bias→topk→renorm(min=1e-12)"),
     (RouterSpec(SOFTMAX, renormalize=True, has_expert_scale=True), "softmax→topk→renorm→expert_scale"),
     (RouterSpec(SIGMOID, ids_given=True), "ids→sigmoid"),
     (RouterSpec(SOFTMAX, ids_given=True, renormalize=True), "ids→softmax→renorm"),
     (RouterSpec(SIGMOID, renormalize=True, num_shared_experts=2), "sigmoid→topk→renorm(with 2 shared)"),
     (RouterSpec(SOFTMAX, num_null_experts=1), "softmax→topk(+1 null)"),
     (RouterSpec(Scoring.SPARSEMIXER, sparsity_threshold=0.02), "topk→sparsemixer(0.02)")],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_the_reference_is_recognised_as_itself(spec: RouterSpec, text: str) -> None:
    assert str(spec) == text
    columns = E + spec.num_shared_experts + spec.num_null_experts
    inputs: dict[str, Any] = {"bias": BIAS} if spec.has_bias else {}
    if spec.has_expert_scale:
        inputs["expert_scale"] = torch.rand(E)
    if spec.ids_given:
        inputs["ids"] = torch.rand(6, E).topk(K).indices

    def reference(logits: Tensor, *values: Tensor) -> Routed:
        return router_reference(spec, logits, K, **dict(zip(inputs, values, strict=True)))

    assert spec_of(reference, *inputs.values(), columns=columns) == spec
