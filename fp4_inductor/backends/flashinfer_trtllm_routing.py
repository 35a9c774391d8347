"""Which routers TensorRT-LLM's kernels run themselves, from logits, exactly as the graph does.

Their weights are bfloat16, so a graph with wider ones keeps its router. Scores are float32. Sums of weights have a
floor of 1e-20 or that much added, which says the same of every sum that is not zero.
"""

from __future__ import annotations

from typing import Any

import torch

from ..spec import MoESpec, RouterSpec, Scoring
from .ops import RouterCall

_FLOOR = 1e-20
_WARP = 32
_LOGITS_DTYPES = (torch.float32, torch.bfloat16)


def routes_inside(spec: MoESpec) -> bool:
    """Whether the kernels' router gives the ids and weights that the graph's does."""
    router = spec.router
    return (
        isinstance(router, RouterSpec)
        and not spec.weight_on_input
        and spec.weights_dtype is torch.bfloat16
        and router.dtype is torch.float32
        and _method(router) is not None
        and _groups_fit(router, spec.num_experts, spec.top_k)
    )


def _method(router: RouterSpec) -> str | None:
    """The name in FlashInfer's ``RoutingMethodType`` of exactly this router, None where it has none."""
    if router.ids_given or router.num_shared_experts or router.num_null_experts or router.has_expert_scale:
        return None
    if max(router.renormalize_eps, router.renormalize_min) > _FLOOR or not isinstance(router.scaling_factor, float):
        return None
    if router.has_bias:
        sigmoid = router.scoring is Scoring.SIGMOID and not router.topk_before_scoring
        return "DeepSeekV3" if sigmoid and router.renormalize else None
    if router.num_groups > 1 or router.scaling_factor != 1.0 or (router.topk_before_scoring and router.renormalize):
        return None
    names = {
        # top-k first, weights divided by their sum
        (Scoring.SOFTMAX, True, False): "Renormalize",
        (Scoring.SOFTMAX, False, True): "RenormalizeNaive",
        (Scoring.SOFTMAX, False, False): "Default",
        (Scoring.SIGMOID, True, False): "TopKSigmoid",
        (Scoring.SIGMOID, False, True): "SigmoidRenorm",
        (Scoring.SIGMOID, False, False): "Sigmoid",
    }
    return names.get((router.scoring, router.topk_before_scoring, router.renormalize))


def _groups_fit(router: RouterSpec, num_experts: int, top_k: int) -> bool:
    """Whether the kernel with groups has room for them: a warp for each, four of which can be left."""
    if router.num_groups == 1:
        return True
    return (
        router.group_score == "top2_sum"
        and router.group_fill == float("-inf")
        and router.num_groups <= 8
        and router.topk_groups <= 4
        and num_experts % 4 == 0
        and 2 <= num_experts // router.num_groups <= _WARP
        and top_k <= 22
    )


def routing_args(call: RouterCall, piece: slice) -> dict[str, Any]:
    """What ``trtllm_fp4_block_scale_moe`` is told of the router for the tokens of ``piece``."""
    from flashinfer.tllm_enums import RoutingMethodType

    router, logits, bias = call.spec, call.logits[piece], call.bias
    method = _method(router)
    assert method is not None, "the plan does not route otherwise"
    grouped = router.num_groups > 1
    return {
        "routing_logits": _as_read(logits),
        "routing_bias": None if bias is None else _as_read(bias),
        "n_group": router.num_groups if grouped else None,
        "topk_group": router.topk_groups if grouped else None,
        "routed_scaling_factor": router.scaling_factor if router.has_bias else None,
        "routing_method_type": int(RoutingMethodType[method]),
    }


def _as_read(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor if tensor.dtype in _LOGITS_DTYPES else tensor.float()).contiguous()
