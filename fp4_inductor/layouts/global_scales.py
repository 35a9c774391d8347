"""Global scales as kernels take them: one an expert and GEMM, where canonical ones may be one a row.

All of them multiply to dequantise. Kernels have one factor for the whole of w13, or one for gate and one for up at
best. Two ways keep a gate and an up that differ exact:

- what is linear in up may carry up's factor on: the kernel computes ``act(gate) * up / ratio``, with
  ``ratio = up / gate``, and w2's factor takes the ratio back (``up_ratio``);
- block scales may take a factor where every product is again an e4m3 (``fold_into_scales``).

Neither holds for all values, and values are known only where weights are prepared: what does not hold raises there.
"""

from __future__ import annotations

import torch

from ..spec import ActivationSpec
from .exactness import require_exact
from .gate_up import RowOrder, split_gate_up


def expert_globals(global_scale: torch.Tensor, num_experts: int) -> torch.Tensor:
    """float32 [E] from canonical global scales [E | 1, N | 1].

    Raises:
        InexactWeightsError: rows of an expert differ.
    """
    rows = global_scale.to(torch.float32).expand(num_experts, -1)
    first = rows[:, 0]
    return require_exact(first, rows == first.unsqueeze(1), "one global scale an expert")


def gate_up_globals(global_scale: torch.Tensor, order: RowOrder, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate's and up's float32 [E] from w13's global scales, [E | 1, 2I] in ``order`` or [E | 1, 1].

    Raises:
        InexactWeightsError: gate rows of an expert differ, or up rows do.
    """
    if global_scale.shape[1] == 1:
        both = expert_globals(global_scale, num_experts)
        return both, both.clone()
    gate, up = split_gate_up(global_scale, order)
    return expert_globals(gate, num_experts), expert_globals(up, num_experts)


def common_globals(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """float32 [E], gate's and up's alike, for what cannot tell them apart.

    Raises:
        InexactWeightsError: they differ in an expert.
    """
    return require_exact(gate, gate == up, "one global scale for gate and up")


def up_ratio(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """float32 [E] ``up / gate``: how much too small the product is where the kernel takes gate's factor for up's.

    Only exact where ``linear_in_up`` holds.

    Raises:
        InexactWeightsError: gate's is zero where up's is not, or the ratio leaves float32.
    """
    ratio = torch.where(gate == up, 1.0, up / gate)
    return require_exact(ratio, ratio.isfinite() & (ratio > 0), "global scales of gate and up with a positive ratio")


def linear_in_up(activation: ActivationSpec, has_bias: bool, *, beta_by_expert: bool = False) -> bool:
    """Whether a factor of up passes through the activation, so that ``up_ratio`` may undo it behind.

    A bound on up does not scale with it. Neither does its bias, which kernels add to dequantised values in few bits,
    nor ``beta``, unless the kernel takes one an expert, which can be divided by the ratio.
    """
    unbounded = activation.limit is None and activation.up_limit is None
    return unbounded and not has_bias and (beta_by_expert or activation.beta == 0.0)


def fold_into_scales(scale: torch.Tensor, factor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Block scales under the factor ``target`` that mean what ``scale`` means under ``factor``.

    Args:
        scale: float8_e4m3fn [E, N, S].
        factor: float32 [E | 1, N | 1], the global scales that ``scale`` stands under.
        target: float32 [E], not zero, that the kernel will apply instead.

    Returns:
        float8_e4m3fn [E, N, S], a new tensor.

    Raises:
        InexactWeightsError: a product is not an e4m3.
    """
    goal = target.to(torch.float64)[:, None, None]
    # Four bits by 24 are exact in float64, so equality there is equality.
    meant = scale.to(torch.float64) * factor.to(torch.float64).unsqueeze(-1)
    folded = (meant / goal).to(torch.float32).to(scale.dtype)
    same = folded.to(torch.float64) * goal == meant
    needed = "global scales whose ratios e4m3 block scales can take over"
    return require_exact(folded.view(torch.uint8), same, needed).view(scale.dtype)
