"""From the router's logits to the output for one token: launches the kernels of ``w4a16_one_token``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..spec import Scoring
from .launch import launch
from .w4a16 import Experts, activation_constants, decode_constants, empty_h, knobs, weight_args
from .w4a16_config import DecodeConfig
from .w4a16_one_token import down_one_token_kernel, gate_up_one_token_kernel
from .w4a16_routing import Router

_TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def chooses_by_logits(router: Router) -> bool:
    """Whether the highest logits are chosen, as the kernels for one token do, and weighed by nothing else."""
    spec, extra = router.spec, (router.bias, router.scale, router.expert_scale)
    in_their_order = spec.topk_before_scoring or spec.scoring is Scoring.SOFTMAX
    return in_their_order and spec.num_groups == 1 and all(tensor is None for tensor in extra)


def run_one_token(
    hidden: torch.Tensor,
    logits: torch.Tensor,
    router: Router,
    experts: Experts,
    config: DecodeConfig,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The block for one token.

    Args:
        hidden: [1, H] bfloat16 or float16; logits: [1, E].
        router: ``chooses_by_logits``.
        config: has ``one_token``.

    Returns:
        [1, H] in ``out_dtype``.
    """
    hidden, logits = hidden.contiguous(), logits.contiguous()
    h = empty_h(hidden, experts, router.top_k)
    out = torch.empty_like(hidden, dtype=out_dtype)
    choice = {
        "NUM_EXPERTS": logits.shape[1],
        "TOP_K": router.top_k,
        "SIZE": triton.next_power_of_2(logits.shape[1]),
    }
    with torch.cuda.device_of(hidden):
        _gate_up_one_token(hidden, logits, experts, config, h, choice)
        _down_one_token(h, logits, router, experts, config, out, choice)
    return out


def _gate_up_one_token(
    hidden: torch.Tensor,
    logits: torch.Tensor,
    experts: Experts,
    config: DecodeConfig,
    h: torch.Tensor,
    choice: dict[str, int],
) -> None:
    """Write h [k, I]."""
    w13, gemm, hidden_size = experts.w13, config.gate_up, hidden.shape[1]
    launch(gate_up_one_token_kernel, (h.shape[0] * (w13.rows.shape[1] // gemm.block_n),))(
        hidden,
        *weight_args(w13),
        logits,
        h,
        hidden_size,
        h.shape[1],
        *knobs(experts.activation),
        PARTS=gemm.split,
        HAS_BIAS=w13.bias is not None,
        **choice,
        **activation_constants(experts.activation),
        **decode_constants(experts.e4m3, hidden_size, gemm, config.pdl),
        num_warps=gemm.split,
    )


def _down_one_token(
    h: torch.Tensor,
    logits: torch.Tensor,
    router: Router,
    experts: Experts,
    config: DecodeConfig,
    out: torch.Tensor,
    choice: dict[str, int],
) -> None:
    """Write out [1, H]."""
    w2, spec, gemm = experts.w2, router.spec, config.one_token
    hidden_size, intermediate_size = out.shape[1], h.shape[1]
    assert gemm is not None
    launch(down_one_token_kernel, (triton.cdiv(hidden_size, gemm.block_n),))(
        h,
        *weight_args(w2),
        logits,
        out,
        hidden_size,
        intermediate_size,
        spec.renormalize_min,
        spec.renormalize_eps,
        spec.scaling_factor,
        SCORING=str(spec.scoring),
        LATE=spec.topk_before_scoring,
        RENORMALIZE=spec.renormalize,
        WEIGHTS_DTYPE=_TRITON_DTYPES[router.weights_dtype],
        HAS_BIAS=w2.bias is not None,
        **choice,
        **decode_constants(experts.e4m3, intermediate_size, gemm, config.pdl),
        num_warps=router.top_k,
    )
