"""The scalars beside NVFP4 weights and activations, in the form of each kernel.

Every function starts from factors that multiply to dequantise, float32 [E]: ``gate``, ``up`` and ``down`` of the
weights (``up`` is None where nothing is gated), ``act1`` and ``act2`` of the activations before either GEMM, which
may also be 0-d. A kernel's own words for them:

    alpha     what a GEMM's accumulator is multiplied by: weight factor times activation factor
    quantise  what activations are multiplied by before they become e4m3 times e2m1: 1 / factor

A kernel with one alpha for w13 takes gate's and gets up wrong by ``up_ratio``, undone behind the activation; that
needs an activation that is linear in up. Where it is not, ask for ``common_globals`` and give both as it.
MXFP4 has no such factors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .gate_up import RowOrder, join_gate_up, split_gate_up
from .global_scales import up_ratio


class TrtllmScales(NamedTuple):
    """Arguments of ``trtllm_fp4_block_scale_moe``, float32 [E], and the units of its accumulators.

    The kernel computes ``output1 * (up + beta) * act(gate * output1_gate)`` on accumulators, and adds biases and
    clamps before that: each of them is to be divided by the unit of what it meets (``in_units``, ``bias_in_units``).
    """

    output1: torch.Tensor
    output1_gate: torch.Tensor
    output2: torch.Tensor
    gate_unit: torch.Tensor
    up_unit: torch.Tensor


def trtllm_scales(
    gate: torch.Tensor, up: torch.Tensor | None, down: torch.Tensor, act1: torch.Tensor, act2: torch.Tensor
) -> TrtllmScales:
    """Scalars of TRTLLM's NVFP4 kernels; gate and up may differ, unless there is a limit.

    ``output2`` is also the unit of w2's bias.
    """
    gate_unit = gate * act1
    up_unit = gate_unit.clone() if up is None else up * act1
    quantise = (1 / act2).expand_as(gate).clone()
    output1 = quantise if up is None else up_unit * quantise
    return TrtllmScales(output1, gate_unit.clone(), down * act2, gate_unit, up_unit)


def in_units(value: torch.Tensor | float, unit: torch.Tensor) -> torch.Tensor:
    """float32 [E] beta or limit, or [E, H] bias of w2, as accumulators of [E] units have it."""
    if isinstance(value, torch.Tensor) and value.dim() == 2:
        unit = unit.unsqueeze(1)
    return value / unit


def bias_in_units(bias: torch.Tensor, order: RowOrder, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """float32 [E, 2I] bias of w13 as accumulators have it: gate rows divided by gate's units, up rows by up's.

    Args:
        bias: [E, 2I] in ``order``.
        gate, up: float32 [E].
    """
    gate_rows, up_rows = split_gate_up(bias.to(torch.float32), order)
    return join_gate_up(gate_rows / gate.unsqueeze(1), up_rows / up.unsqueeze(1), order)


class CutlassScales(NamedTuple):
    """Scalars of ``cutlass_fused_moe`` with NVFP4, float32 [E], in the order of ``quant_scales``.

    beta_unit: what ``swiglu_beta`` is to be divided by.
    """

    quantise1: torch.Tensor
    alpha1: torch.Tensor
    quantise2: torch.Tensor
    alpha2: torch.Tensor
    beta_unit: torch.Tensor


def cutlass_scales(
    gate: torch.Tensor, up: torch.Tensor | None, down: torch.Tensor, act1: torch.Tensor, act2: torch.Tensor
) -> CutlassScales:
    """Scalars of CUTLASS's NVFP4 kernels; the ratio of up goes into how each expert's product is quantised.

    Biases and limits meet dequantised values, so they stay as they are, and need equal gate and up.
    """
    ratio = _ratio(gate, up)
    quantise1 = (1 / act1).expand_as(gate).clone()
    return CutlassScales(quantise1, gate * act1, ratio / act2, down * act2, ratio)


class CutedslScales(NamedTuple):
    """Scalars of ``cute_dsl_fused_moe``, float32: alphas [E]; ``quantise2`` [1], or None where nothing is quantised."""

    alpha1: torch.Tensor
    quantise2: torch.Tensor | None
    alpha2: torch.Tensor


def cutedsl_scales(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    down: torch.Tensor,
    act1: torch.Tensor | None = None,
    act2: torch.Tensor | None = None,
) -> CutedslScales:
    """Scalars of CuTe-DSL's kernels: w4a4 with both activation factors, w4a16 with neither.

    One factor quantises the products of all experts, so it is the largest that any needs.
    """
    ratio = _ratio(gate, up)
    if act1 is None or act2 is None:
        return CutedslScales(gate.clone(), None, down * ratio)
    widest = (act2 / ratio).amax()
    return CutedslScales(gate * act1, (1 / widest).reshape(1), down * ratio * widest)


class B12xScales(NamedTuple):
    """Scalars of ``b12x_fused_moe``, float32 [E]; it divides by what others multiply by.

    The kernel multiplies ``alpha1`` by ``divide1`` itself, and ``alpha2`` by nothing.
    """

    divide1: torch.Tensor
    alpha1: torch.Tensor
    divide2: torch.Tensor
    alpha2: torch.Tensor


def b12x_scales(
    gate: torch.Tensor, up: torch.Tensor | None, down: torch.Tensor, act1: torch.Tensor, act2: torch.Tensor
) -> B12xScales:
    """Scalars of b12x's NVFP4 kernels, ``input_global_scale``, ``w1_alpha``, ``fc2_input_scale``, ``w2_alpha``.

    With ``act1 = act2 = 1`` blocks are scaled by what they hold alone. Its w4a16 kernels take the alphas of
    ``cutedsl_scales`` without activations.
    """
    ratio = _ratio(gate, up)
    return B12xScales(act1.expand_as(gate).clone(), gate.clone(), act2 / ratio, down * act2)


def _ratio(gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    return torch.ones_like(gate) if up is None else up_ratio(gate, up)
