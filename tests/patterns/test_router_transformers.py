"""The routers of transformers, as compiled graphs have them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from capture import Level, capture
from fp4_inductor.patterns.router import identify_router
from router_spellings import E, H, K, Routed, Tensor, hold_to_values, outputs
from torch import nn

from fp4_inductor.spec import RUNTIME, Operand, RouterSpec, Scoring

SOFTMAX, SIGMOID, SQRT_SOFTPLUS = Scoring.SOFTMAX, Scoring.SIGMOID, Scoring.SQRT_SOFTPLUS
VOCAB = 50
TRANSFORMERS = tuple(map(int, version("transformers").split(".")[:2]))
CONFIG: dict[str, Any] = {
    "hidden_size": H,
    "num_experts": E,
    "num_local_experts": E,
    "n_routed_experts": E,
    "num_experts_per_tok": K,
    "top_k_experts": K,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "route_scale": 2.5,
    "scoring_func": "sqrtsoftplus",
    "expert_selection_fn": "sigmoid",
    "moe_router_logit_softcapping": 5.0,
    "moe_norm_min": 1e-12,
    "use_expert_bias": True,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "router_jitter_noise": 0.01,
    "input_jitter_noise": 0.0,
    "router_hidden_size": 16,
    "output_multiplier": 0.7,
}
"""What routers read of a config, by every name that families give it."""

BIASED = RouterSpec(SIGMOID, has_bias=True, renormalize=True, renormalize_eps=1e-20, scaling_factor=2.5)
GROUPED = replace(BIASED, num_groups=4, topk_groups=2)


@dataclass(frozen=True)
class Hf:
    """A family's router: its class, what it is, and how ids and weights are got from it."""

    name: str
    spec: RouterSpec
    call: Callable[[nn.Module, Tensor, Tensor], Routed] = lambda router, hidden, _: router(hidden)[:0:-1]
    top_k: int = K
    knobs: bool = False
    """Whether numbers beside the scaling factor are attributes, which dynamic sizes may turn into inputs."""


def given_bias(router: nn.Module, hidden: Tensor, bias: Tensor) -> Routed:
    return router(hidden, bias)[:0:-1]


def flat(router: nn.Module, hidden: Tensor, _: Tensor) -> Routed:
    return router(hidden.reshape(-1, H))[:0:-1]


ROUTERS = {
    "mixtral": Hf("MixtralTopKRouter", RouterSpec(SOFTMAX, renormalize=True)),
    "qwen3_moe": Hf("Qwen3MoeTopKRouter", RouterSpec(SOFTMAX, renormalize=True)),
    "jamba": Hf("JambaTopKRouter", RouterSpec(SOFTMAX), flat),
    "gpt_oss": Hf("GptOssTopKRouter", RouterSpec(SOFTMAX, topk_before_scoring=True), flat),
    "openai_privacy_filter": Hf(
        "OpenAIPrivacyFilterTopKRouter",
        RouterSpec(SOFTMAX, topk_before_scoring=True, scaling_factor=1 / K),
        flat,
    ),
    "cohere2_moe": Hf(
        "Cohere2MoeTopKRouter",
        RouterSpec(SIGMOID, topk_before_scoring=True, renormalize=True, dtype=torch.bfloat16),
        flat,
    ),
    "deepseek_v3": Hf("DeepseekV3TopkRouter", GROUPED),
    "deepseek_v2": Hf(
        "DeepseekV2TopkRouter",
        RouterSpec(SOFTMAX, num_groups=4, topk_groups=2, group_score="max", group_fill=0.0, scaling_factor=2.5),
    ),
    "mistral4": Hf(
        "Mistral4TopkRouter",
        replace(GROUPED, scoring=SOFTMAX, has_bias=False, group_fill=0.0, dtype=torch.bfloat16),
    ),
    "axk2": Hf("AXK2TopkRouter", replace(GROUPED, group_fill=0.0)),
    "afmoe": Hf("AfmoeTokenChoiceRouter", BIASED, given_bias),
    "laguna": Hf("LagunaTopKRouter", RouterSpec(SIGMOID, has_bias=True, renormalize=True)),
    "lfm2_moe": Hf(
        "Lfm2MoeTopKRouter",
        replace(BIASED, renormalize_eps=1e-6, dtype=torch.bfloat16),
        lambda router, hidden, bias: router(hidden.reshape(-1, H), bias)[:0:-1],
    ),
    "flint": Hf("FlintTopKRouter", RouterSpec(SIGMOID, renormalize=True)),
    "kolibri1": Hf(
        "Kolibri1TopKRouter", RouterSpec(SIGMOID, topk_before_scoring=True, has_bias=True, renormalize=True)
    ),
    "ernie4_5_moe": Hf(
        "Ernie4_5_MoeTopKRouter",
        RouterSpec(SOFTMAX, has_bias=True, renormalize=True, renormalize_min=1e-12),
        flat,
    ),
    "gemma4": Hf("Gemma4TextRouter", RouterSpec(SOFTMAX, renormalize=True, has_expert_scale=True), flat),
    "deepseek_v4": Hf("DeepseekV4TopKRouter", replace(BIASED, scoring=SQRT_SOFTPLUS, dtype=torch.bfloat16)),
    "muse_spark": Hf("MuseSparkTopkRouter", replace(BIASED, renormalize_eps=1e-15), knobs=True),
    "inkling": Hf(
        "InklingTopkRouter",
        replace(BIASED, renormalize_eps=0.0, num_shared_experts=2, scaling_factor=RUNTIME, dtype=torch.bfloat16),
        lambda router, hidden, _: router(hidden)[2:0:-1],
    ),
    "phimoe": Hf(
        "PhimoeTopKRouter",
        RouterSpec(Scoring.SPARSEMIXER, sparsity_threshold=0.02, dtype=torch.bfloat16),
        flat,
        top_k=2,
        knobs=True,
    ),
    "zaya": Hf(
        "ZayaRouter",
        RouterSpec(SOFTMAX, has_bias=True, num_null_experts=1, dtype=torch.bfloat16),
        lambda router, hidden, _: router(hidden)[2:0:-1],
        top_k=1,
    ),
}


class Routes(nn.Module):
    """A family's router alone, with random weights, biases and scales."""

    def __init__(self, family: str, name: str, top_k: int) -> None:
        super().__init__()
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        config = SimpleNamespace(**CONFIG | {"num_experts_per_tok": top_k})
        extra = (0,) if family == "zaya" else ()
        self.router = getattr(module, name)(config, *extra).to(torch.bfloat16).eval().requires_grad_(False)
        self.call = (ROUTERS.get(family) or HASHED).call if name != HASHED.name else HASHED.call
        for parameter in [*self.router.parameters(), *self.router.buffers()]:
            if parameter.is_floating_point():
                nn.init.normal_(parameter)

    def forward(self, hidden: Tensor, other: Tensor) -> Routed:
        ids, weights = self.call(self.router, hidden, other)
        return ids, weights


HASHED = Hf(
    "DeepseekV4HashRouter",
    replace(BIASED, scoring=SQRT_SOFTPLUS, has_bias=False, ids_given=True, dtype=torch.bfloat16),
    lambda router, hidden, tokens: router(hidden, tokens)[:0:-1],
)


def check(family: str, entry: Hf, other: Tensor, level: Level, dynamic: bool) -> None:
    path = f"transformers.models.{family}.modeling_{family}"
    module = pytest.importorskip(path, reason=f"this transformers has no {family}")
    if not hasattr(module, entry.name):
        pytest.skip(f"this transformers has no {entry.name}")
    model = Routes(family, entry.name, entry.top_k)
    graph = capture(model, torch.randn(2, 7, H, dtype=torch.bfloat16), other, level=level, dynamic=dynamic)
    ids, weights = outputs(graph)[-2:]
    router = identify_router(ids, weights, E, entry.top_k)
    hold_to_values(router, ids, weights, E, entry.top_k)
    expected = entry.spec
    if Operand.ROUTER_SCALE in router.operands:  # where sizes are dynamic, so is a float attribute of a module
        assert dynamic or expected.scaling_factor is RUNTIME
        expected = replace(expected, scaling_factor=RUNTIME)
    if TRANSFORMERS < (5, 23):  # which scores in other dtypes here and there
        expected = replace(expected, dtype=router.spec.dtype)
    assert router.spec == expected
    assert (Operand.ROUTER_BIAS in router.operands) == expected.has_bias
    assert (Operand.ROUTER_EXPERT_SCALE in router.operands) == expected.has_expert_scale


@pytest.mark.parametrize(
    ("family", "level", "dynamic"),
    [(family, level, dynamic)
     for family, entry in ROUTERS.items()
     for level, dynamic in (("inner", True), ("post_grad", False)) if not (dynamic and entry.knobs)],
)  # fmt: skip
def test_routers_of_transformers(family: str, level: Level, dynamic: bool) -> None:
    check(family, ROUTERS[family], torch.randn(E), level, dynamic)


@pytest.mark.parametrize(("level", "dynamic"), [("inner", True), ("post_grad", False)])
def test_experts_by_token_id(level: Level, dynamic: bool) -> None:
    check("deepseek_v4", HASHED, torch.randint(0, VOCAB, (2, 7)), level, dynamic)
