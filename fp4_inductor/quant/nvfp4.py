"""NVFP4: one e4m3 scale per block of 16, under a float32 global scale per expert."""

from __future__ import annotations

import torch

from ..formats import E2M1_MAX, E4M3_MAX, E4M3_MIN, NVFP4
from . import e2m1
from .blocks import check_blocks


def nvfp4_global_scale(weight: torch.Tensor) -> torch.Tensor:
    """The global scale with which the largest weight is 6 * 448: ``amax / 2688``, 1 for zeros.

    Args:
        weight: ``float [..., N, K]``; one scale per leading index, so gate and up rows share theirs.

    Returns:
        ``float32 [..., 1]``.
    """
    amax = weight.abs().amax(dim=(-2, -1)).to(torch.float32).unsqueeze(-1)
    scale = _divide(amax, E2M1_MAX * E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(amax > 0, scale, 1.0)


def quantize_nvfp4(
    weight: torch.Tensor, global_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise along the last axis, every operation rounded to float32.

    ``scale = e4m3(clamp((block_amax / 6) / global_scale, 2^-9, 448))`` and codes nearest to
    ``weight / (scale * global_scale)``. The lower clamp keeps blocks of zeros, and blocks far below
    the largest, free of 0 / 0; both clamps come before the cast, which torch versions saturate differently.

    Args:
        weight: ``float [..., N, K]``, K a multiple of 16; rounded to float32 if wider.
        global_scale: ``float32 [..., 1]`` or ``[..., N]``; None takes ``nvfp4_global_scale(weight)``.

    Returns:
        codes: ``uint8 [..., N, K/2]``.
        block scale: ``float8_e4m3fn [..., N, K/16]``.
        global scale: ``float32``, as given or ``[..., 1]``.

    Raises:
        QuantizationError: K is not a multiple of 16, or a weight is not finite.
    """
    blocks = check_blocks(weight, NVFP4)
    if global_scale is None:
        global_scale = nvfp4_global_scale(weight)
    row_scale = global_scale.unsqueeze(-1)
    amax = blocks.abs().amax(dim=-1)
    scale = (_divide(amax, E2M1_MAX) / row_scale).clamp(E4M3_MIN, E4M3_MAX).to(torch.float8_e4m3fn)
    step = scale.to(torch.float32) * row_scale
    codes = e2m1.encode(blocks / step.unsqueeze(-1))
    return e2m1.pack(codes.flatten(-2)), scale, global_scale


def _divide(x: torch.Tensor, by: float) -> torch.Tensor:
    """``x / by``, rounded once on every device: a GPU would multiply by the rounded reciprocal of a Python number."""
    return x / torch.full_like(x, by)
