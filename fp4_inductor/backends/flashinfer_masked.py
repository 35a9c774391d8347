"""FlashInfer's masked grouped GEMM, ``grouped_gemm_nt_masked``, as a block: NVFP4 × NVFP4 on sm_100 and sm_103.

Rows of tokens stand expert by expert, as many for each as there are tokens; of these the kernel computes those that are
there. Between the GEMMs it is plain torch in float32, so that biases, any activation, and factors of gate and up that
differ are exact. That costs memory for all experts, and launches: it is for what the fused kernel does not know.
"""

from __future__ import annotations

from functools import cache, partial

import torch

from ..device import DeviceInfo
from ..formats import NVFP4
from ..layouts.gate_up import UP_GATE
from ..layouts.kernel_rows import KernelRows
from ..layouts.scale_128x4 import TILE_ROWS, mma_scale_view
from ..plan import KernelPlan, PlanArg, Prepared
from ..quant.nvfp4 import nvfp4_global_scale
from ..reasons import Reason, ReasonCode
from ..reference import activate
from ..spec import GateUpOrder, MoESpec, Operand
from .flashinfer_common import Mode, common_reasons, padded_hidden, padding_text, routes_table, unless_empty
from .flashinfer_cute_common import cute_reasons, joined, routes, weight
from .flashinfer_weights import PRODUCT_FACTOR, Placing
from .ops import ExpertsCall, ExpertWeights, define_experts_op, experts_args

MODE = Mode(NVFP4, "nvfp4", frozenset({100, 103}), frozenset(), KernelRows(UP_GATE, 256, 128, 128))
MAX_ELEMENTS = 1 << 28
"""Of the rows of all experts in one call, of which there are a few copies, some in float32."""
_SUFFIX = "masked_nvfp4"


def _block(call: ExpertsCall) -> torch.Tensor:
    experts, hidden_size = call.w2.codes.shape[:2]
    widest = max(hidden_size, call.w13.codes.shape[1])
    tiles = max(1, MAX_ELEMENTS // (experts * widest * TILE_ROWS))
    most = TILE_ROWS << (tiles.bit_length() - 1)
    hidden, (ids, weights) = padded_hidden(call.hidden, hidden_size), routes(call)
    starts = range(0, len(hidden), most)
    outputs = [_piece(call, *(t[start : start + most] for t in (hidden, ids, weights))) for start in starts]
    return joined(outputs, call.hidden.shape[1])


def _piece(call: ExpertsCall, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The block [T, H] in ``out_dtype`` from padded hidden states and -1 for routes to no expert."""
    experts, top_k = call.w2.codes.shape[0], ids.shape[1]
    room = max(TILE_ROWS, 1 << (len(hidden) - 1).bit_length())
    counts, places = _places(ids, experts, room)
    rows = hidden.new_zeros(experts * room + 1, hidden.shape[1])
    rows[places.flatten()] = hidden.repeat_interleave(top_k, dim=0)
    factor = nvfp4_global_scale(hidden)
    quantise = (1 / factor).expand(experts).contiguous()
    gate_up = _gemm(rows[:-1].view(experts, room, -1), call.w13, counts, quantise)
    halves = gate_up.unflatten(2, (_units(call).shape[1], -1)) * (_units(call) * factor)[:, None, :, None]
    product = activate(_biased(halves.flatten(2), call.w13), call.activation, GateUpOrder.UP_GATE)
    quantise = torch.full_like(quantise, 1 / PRODUCT_FACTOR)
    down = _gemm(product.to(hidden.dtype), call.w2, counts, quantise)
    assert call.w2.global_scale is not None, "the plan prepares them"
    results = _biased(down * call.w2.global_scale[:, None, None], call.w2).flatten(0, 1)
    # Rows that are not there hold anything, and nothing may be multiplied by zero to be rid of it.
    taken = torch.where((ids >= 0).unsqueeze(2), results[places.clamp(max=len(results) - 1)], 0.0)
    return (taken * weights.unsqueeze(2)).sum(dim=1).to(call.out_dtype)


def _units(call: ExpertsCall) -> torch.Tensor:
    assert call.w13.global_scale is not None, "the plan prepares them"
    return call.w13.global_scale


def _places(ids: torch.Tensor, experts: int, room: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [E], how many routes an expert has; int64 [T, k], the row of each route among ``room`` rows an expert.

    A route to no expert has the row behind all others.
    """
    target = torch.where(ids >= 0, ids, experts).long()
    chosen = torch.zeros(len(ids), experts + 1, dtype=torch.int32, device=ids.device).scatter_(1, target, 1)
    before = chosen.cumsum(0, dtype=torch.int32) - chosen
    places = torch.where(ids >= 0, target * room + before.gather(1, target), experts * room)
    return chosen[:, :experts].sum(0, dtype=torch.int32), places


def _gemm(rows: torch.Tensor, weights: ExpertWeights, counts: torch.Tensor, quantise: torch.Tensor) -> torch.Tensor:
    """float32 [E, M, N], in units of codes: the first ``counts`` of bfloat16 rows [E, M, K] by weights [E, N, K/2]."""
    from flashinfer import scaled_fp4_grouped_quantize
    from flashinfer.gemm import grouped_gemm_nt_masked

    experts, room, _ = rows.shape
    out = rows.new_empty(experts, room, weights.codes.shape[1])
    grouped_gemm_nt_masked(
        scaled_fp4_grouped_quantize(rows.contiguous(), counts, quantise),
        (weights.codes.permute(1, 2, 0), mma_scale_view(weights.scale)),
        out.permute(1, 2, 0),
        counts,
        ab_dtype="float4_e2m1fn",
        sf_dtype="float8_e4m3fn",
        c_dtype="bfloat16",
        sf_vec_size=NVFP4.block_size,
    )
    return out.float()


def _biased(rows: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
    return rows if weights.bias is None else rows + weights.bias.unsqueeze(1)


_OP = define_experts_op("moe_flashinfer_masked_nvfp4", unless_empty(_block))


def masked_reasons(spec: MoESpec, device: DeviceInfo) -> list[Reason]:
    """Everything against ``spec``; no activation and no bias is."""
    reasons = (*common_reasons((MODE,), spec, device), *cute_reasons(spec, device))
    return [reason for reason in reasons if reason.code not in (ReasonCode.ACTIVATION, ReasonCode.BIAS)]


def masked_plan(spec: MoESpec) -> KernelPlan:
    placing = Placing.of(spec, MODE.rows)
    ready: dict[str, PlanArg] = {
        **weight("w13", _SUFFIX, MODE, placing),
        **weight("w2", _SUFFIX, MODE, placing),
        **_factors(placing),
    }
    padding, layout = padding_text(spec, MODE.rows), "rows, scale tiles"
    args = experts_args(spec, table=routes_table(spec), **ready)  # type: ignore[arg-type]
    return KernelPlan(_OP, args, layout=layout, padding=padding, activations=MODE.activations)


@cache
def _factors(placing: Placing) -> dict[str, Prepared]:
    """Global scales and biases in float32; cached, so that equal layers share their recipes."""
    w13, w2 = Operand.W13_GLOBAL, Operand.W2_GLOBAL
    biases = {
        f"{name}_bias": Prepared(f"{name}_bias_{_SUFFIX}", partial(_bias, name, placing), (Operand(f"{name}_bias"),))
        for name in ("w13", "w2")
    }
    return {
        "w13_global": Prepared(f"w13_units_{_SUFFIX}", partial(_w13_units, placing), (w13,)),
        "w2_global": Prepared(f"w2_unit_{_SUFFIX}", placing.product_globals, (w2,)),
        **biases,
    }


def _w13_units(placing: Placing, w13_global: torch.Tensor) -> torch.Tensor:
    """float32 [E, 2] up's and gate's factors, or [E, 1]."""
    gate, up = placing.globals(False, w13_global)
    return gate.unsqueeze(1) if up is None else torch.stack((up, gate), dim=1)


def _bias(name: str, placing: Placing, bias: torch.Tensor) -> torch.Tensor:
    return placing.rows(name, bias.to(torch.float32))
