"""Routers that must be recognised, transformers' own among them, and near twins that must not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture import Level, capture
from fp4_inductor.patterns.router import IdentifiedRouter, identify_router, router_reference
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fp4_inductor.matching import NoMatch
from fp4_inductor.spec import RUNTIME, RouterSpec, Scoring

Tensor = torch.Tensor
Routed = tuple[Tensor, Tensor]
E, K, H = 16, 3, 24


def name_of(value: object) -> str | None:
    return getattr(value, "__name__", None) if callable(value) else None


def outputs(graph: fx.GraphModule) -> list[fx.Node]:
    (values,) = next(iter(reversed(graph.graph.nodes))).args
    return list(values)


def traced(fn: Callable[..., Routed], *inputs: Tensor, tokens: int = 6) -> tuple[fx.Node, fx.Node]:
    functional = torch.func.functionalize(lambda *args: fn(*args), remove="mutations_and_views")
    ids, weights = outputs(make_fx(functional, tracing_mode="fake")(torch.randn(tokens, E), *inputs))
    return ids, weights


def found(fn: Callable[..., Routed], *inputs: Tensor, tokens: int = 6) -> IdentifiedRouter:
    ids, weights = traced(fn, *inputs, tokens=tokens)
    return identify_router(ids, weights, E, K)


def softmax_topk(logits: Tensor) -> Routed:
    weights, ids = logits.softmax(-1, dtype=torch.float32).topk(K, -1)
    return ids, weights


def softmax_topk_renorm(logits: Tensor) -> Routed:
    ids, weights = softmax_topk(logits)
    return ids, weights / weights.sum(-1, keepdim=True)


def topk_softmax(logits: Tensor) -> Routed:
    values, ids = logits.topk(K, -1)
    return ids, values.softmax(-1)


def topk_sigmoid(logits: Tensor) -> Routed:
    values, ids = logits.topk(K, -1)
    return ids, values.sigmoid()


def sigmoid_bias(logits: Tensor, bias: Tensor, scale: float | Tensor = 2.5, eps: float = 1e-20) -> Routed:
    scores = logits.sigmoid()
    ids = (scores + bias).topk(K, -1, sorted=False).indices
    weights = scores.gather(1, ids)
    return ids, weights / (weights.sum(-1, keepdim=True) + eps) * scale


def grouped(logits: Tensor, bias: Tensor, *, fill: float = float("-inf"), best: int = 2, kept: int = 2,
            scoring: Callable[[Tensor], Tensor] = torch.sigmoid) -> Routed:  # fmt: skip
    scores = scoring(logits)
    choice = scores + bias
    group_scores = choice.view(-1, 4, E // 4).topk(best, -1).values.sum(-1)
    mask = torch.zeros_like(group_scores).scatter(1, group_scores.topk(kept, -1, sorted=False).indices, 1)
    mask = mask.unsqueeze(-1).expand(-1, 4, E // 4).reshape(-1, E)
    ids = choice.masked_fill(~mask.bool(), fill).topk(K, -1, sorted=False).indices
    weights = scores.gather(1, ids)
    return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5


def sqrt_softplus(logits: Tensor, bias: Tensor) -> Routed:
    scores = F.softplus(logits).sqrt()
    ids = (scores + bias).topk(K, -1).indices
    weights = scores.gather(1, ids)
    return ids, weights / weights.sum(-1, keepdim=True) * 1.5


SOFTMAX, SIGMOID = Scoring.SOFTMAX, Scoring.SIGMOID
GROUPED = RouterSpec(
    SIGMOID, has_bias=True, num_groups=4, topk_groups=2, renormalize=True, renormalize_eps=1e-20, scaling_factor=2.5
)
BIAS = torch.randn(E)


@pytest.mark.parametrize("tokens", [1, 6, 2048])
@pytest.mark.parametrize(
    ("fn", "spec"),
    [(softmax_topk, RouterSpec(SOFTMAX)), (softmax_topk_renorm, RouterSpec(SOFTMAX, renormalize=True)),
     (topk_softmax, RouterSpec(SOFTMAX, topk_before_scoring=True)),
     (topk_sigmoid, RouterSpec(SIGMOID, topk_before_scoring=True))],
    ids=name_of,
)  # fmt: skip
def test_routers_without_bias(fn: Callable[..., Routed], spec: RouterSpec, tokens: int) -> None:
    router = found(fn, tokens=tokens)
    assert router.spec == spec
    assert router.logits.op == "placeholder"
    assert router.bias is None


def test_sigmoid_with_bias() -> None:
    router = found(sigmoid_bias, BIAS)
    assert router.spec == RouterSpec(
        SIGMOID, has_bias=True, renormalize=True, renormalize_eps=1e-20, scaling_factor=2.5
    )
    assert router.bias is not None
    assert router.bias.op == "placeholder"


@pytest.mark.parametrize("eps", [0.0, 1e-20, 1e-6])
def test_what_is_added_to_the_sum(eps: float) -> None:
    assert found(lambda logits, bias: sigmoid_bias(logits, bias, eps=eps), BIAS).spec.renormalize_eps == eps


def test_groups() -> None:
    assert found(grouped, BIAS).spec == GROUPED
    best = found(lambda logits, bias: grouped(logits, bias, best=1), BIAS).spec
    assert (best.group_score, best.num_groups) == ("max", 4)
    assert found(lambda logits, bias: grouped(logits, bias, kept=3), BIAS).spec.topk_groups == 3


@pytest.mark.parametrize("fill", [float("-inf"), 0.0])
def test_what_masked_groups_are_filled_with(fill: float) -> None:
    """Positive scores hide it: a fill of zero wins over experts of negative bias."""
    assert found(lambda logits, bias: grouped(logits, bias, fill=fill), BIAS).spec.group_fill == fill


def test_sqrt_softplus() -> None:
    spec = found(sqrt_softplus, BIAS).spec
    assert spec == RouterSpec(Scoring.SQRT_SOFTPLUS, has_bias=True, renormalize=True, scaling_factor=1.5)


def test_scaling_factor_at_run_time() -> None:
    router = found(sigmoid_bias, BIAS, torch.tensor(2.5, dtype=torch.float64))
    assert router.spec.scaling_factor is RUNTIME
    assert [node.op for node in router.scalars.values()] == ["placeholder"]
    assert list(router.scalars) == ["scaling_factor"]


def test_dtype_of_scores() -> None:
    def low(logits: Tensor) -> Routed:
        weights, ids = logits.to(torch.bfloat16).softmax(-1).topk(K, -1)
        return ids, weights / weights.sum(-1, keepdim=True)

    assert found(low).spec.dtype == torch.bfloat16
    assert found(softmax_topk).spec.dtype == torch.float32


@pytest.mark.parametrize(
    "spec",
    [RouterSpec(SOFTMAX), RouterSpec(SOFTMAX, topk_before_scoring=True), GROUPED,
     RouterSpec(SIGMOID, has_bias=True, num_groups=4, topk_groups=1, group_score="max", group_fill=0.0),
     RouterSpec(Scoring.SQRT_SOFTPLUS, has_bias=True, renormalize=True, renormalize_eps=1e-6, scaling_factor=0.5)],
    ids=str,
)  # fmt: skip
def test_the_reference_is_recognised_as_itself(spec: RouterSpec) -> None:
    inputs = [BIAS] if spec.has_bias else []
    assert found(lambda logits, *bias: router_reference(spec, logits, K, *bias), *inputs).spec == spec


# --- twins that must be refused


def biased_weights(logits: Tensor, bias: Tensor) -> Routed:
    weights, ids = (logits.sigmoid() + bias).topk(K, -1)
    return ids, weights / weights.sum(-1, keepdim=True)


def biased_logits(logits: Tensor, bias: Tensor) -> Routed:
    ids = (logits + bias).topk(K, -1).indices
    return ids, logits.gather(1, ids).sigmoid()


def clamped_sum(logits: Tensor, bias: Tensor) -> Routed:
    scores = logits.sigmoid()
    ids = (scores + bias).topk(K, -1).indices
    weights = scores.gather(1, ids)
    return ids, weights / weights.sum(-1, keepdim=True).clamp_min(1e-12)


def small_weights_dropped(logits: Tensor, bias: Tensor) -> Routed:
    ids, weights = sigmoid_bias(logits, bias)
    return ids, torch.where(weights < 0.1, 0.0, weights)


def one_group_too_many(logits: Tensor, bias: Tensor) -> Routed:
    weights = grouped(logits, bias)[1]
    other = grouped(logits, bias, kept=3)[0]
    return other, weights


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


def scale_by_expert(logits: Tensor, bias: Tensor) -> Routed:
    ids, weights = softmax_topk_renorm(logits)
    return ids, weights * bias[ids]


@pytest.mark.parametrize(
    "fn",
    [biased_weights, biased_logits, clamped_sum, small_weights_dropped, one_group_too_many, least_experts,
     unlike_slots, joint_softmax, scale_by_expert],
    ids=name_of,
)  # fmt: skip
def test_twins_are_refused(fn: Callable[..., Routed]) -> None:
    with pytest.raises(NoMatch):
        found(fn, BIAS)


def test_softcapped_logits_are_cut_behind_the_cap() -> None:
    ids, weights = traced(lambda logits: softmax_topk_renorm(torch.tanh(logits / 30) * 30))
    router = identify_router(ids, weights, E, K)
    assert router.spec == RouterSpec(SOFTMAX, renormalize=True)
    assert router.logits.op == "call_function"


def test_ids_from_elsewhere_are_refused() -> None:
    def hashed(logits: Tensor, table: Tensor) -> Routed:
        return table, logits.sigmoid().gather(1, table)

    with pytest.raises(NoMatch):
        found(hashed, torch.randint(0, E, (6, K)))


# --- transformers' own

BIASED = {"has_bias": True, "renormalize": True, "renormalize_eps": 1e-20, "scaling_factor": 2.5}
HF: dict[str, tuple[str, dict[str, Any], RouterSpec]] = {
    "mixtral": ("MixtralTopKRouter", {"num_local_experts": E}, RouterSpec(SOFTMAX, renormalize=True)),
    "qwen3_moe": ("Qwen3MoeTopKRouter", {"num_experts": E, "norm_topk_prob": True},
                  RouterSpec(SOFTMAX, renormalize=True)),
    "olmoe": ("OlmoeTopKRouter", {"num_experts": E, "norm_topk_prob": False}, RouterSpec(SOFTMAX)),
    "gpt_oss": ("GptOssTopKRouter", {"num_local_experts": E}, RouterSpec(SOFTMAX, topk_before_scoring=True)),
    "deepseek_v3": ("DeepseekV3TopkRouter", {"n_routed_experts": E, "n_group": 4, "topk_group": 2,
                                             "routed_scaling_factor": 2.5, "norm_topk_prob": True}, GROUPED),
    "glm4_moe": ("Glm4MoeTopkRouter", {"n_routed_experts": E, "n_group": 1, "topk_group": 1,
                                       "routed_scaling_factor": 2.5, "norm_topk_prob": True},
                 RouterSpec(SIGMOID, **BIASED)),
    "deepseek_v2": ("DeepseekV2TopkRouter", {"n_routed_experts": E, "n_group": 4, "topk_group": 2,
                                             "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.5},
                    RouterSpec(SOFTMAX, num_groups=4, topk_groups=2, group_score="max", group_fill=0.0,
                               scaling_factor=2.5)),
    "axk2": ("AXK2TopkRouter", {"n_routed_experts": E, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
                                "routed_scaling_factor": 2.5},
             RouterSpec(SIGMOID, num_groups=4, topk_groups=2, group_fill=0.0, **BIASED)),
    "deepseek_v4": ("DeepseekV4TopKRouter", {"n_routed_experts": E, "scoring_func": "sqrtsoftplus",
                                             "routed_scaling_factor": 2.5},
                    RouterSpec(Scoring.SQRT_SOFTPLUS, dtype=torch.bfloat16, **BIASED)),
}  # fmt: skip


class HfRouter(nn.Module):
    def __init__(self, family: str) -> None:
        super().__init__()
        import importlib

        from transformers import AutoConfig

        name, settings, _ = HF[family]
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        config = AutoConfig.for_model(family, hidden_size=H, num_attention_heads=2, num_experts_per_tok=K, **settings)
        self.router = getattr(module, name)(config).to(torch.bfloat16).requires_grad_(False)
        nn.init.normal_(self.router.weight)

    def forward(self, hidden: Tensor) -> Routed:
        _, weights, ids = self.router(hidden.reshape(-1, H))
        return ids, weights


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("level", ["inner", "post_grad"])
@pytest.mark.parametrize("family", HF)
def test_routers_of_transformers(family: str, level: Level, dynamic: bool) -> None:
    pytest.importorskip(f"transformers.models.{family}", reason=f"this transformers has no {family}")
    graph = capture(HfRouter(family), torch.randn(2, 7, H, dtype=torch.bfloat16), level=level, dynamic=dynamic)
    ids, weights = outputs(graph)[-2:]
    router = identify_router(ids, weights, E, K)
    expected = HF[family][2]
    if router.scalars:  # a float attribute of a module becomes an input where sizes are dynamic
        assert dynamic
        expected = replace(expected, scaling_factor=RUNTIME)
    assert router.spec == expected
    assert (router.bias is not None) == expected.has_bias
