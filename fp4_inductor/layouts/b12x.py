"""What must hold of NVFP4 weights so that b12x's packing for bfloat16 activations, which FlashInfer does, is exact.

Packed block scales have five bits of exponent and three of mantissa, in the place of float16's, and none below 2.
All of a layer's are first multiplied by 2**7, and by the largest power of two that keeps the largest at 448 * 2**7 at
most; what is still below 2 becomes zero. Global scales are multiplied by 2**119 in float32.
"""

from __future__ import annotations

import torch

from ..formats import E4M3_MAX
from .exactness import require_exact

_SMALLEST = 2.0**-6
_LARGEST_GLOBAL = 2.0**8


def require_packable(scale: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Block scales that packing keeps, or under which there are only zeros.

    Args:
        scale: float8_e4m3fn [E, N, S] of one GEMM, none negative.
        codes: uint8 [E, N, K/2].

    Returns:
        ``scale``, a new tensor.

    Raises:
        InexactWeightsError: a block would become zero.
    """
    value = scale.to(torch.float64)
    largest = value.amax().clamp(min=torch.finfo(torch.float64).tiny)
    factor = torch.exp2((E4M3_MAX / largest).log2().floor())
    empty = (codes.reshape(*scale.shape, -1) & 0x77 == 0).all(dim=-1)
    needed = "block scales within 2**-14 of the largest of all experts"
    return require_exact(scale.view(torch.uint8), empty | (value * factor >= _SMALLEST), needed).view(scale.dtype)


def require_packable_globals(alpha: torch.Tensor) -> torch.Tensor:
    """float32 [E] global scales that packing keeps finite.

    Raises:
        InexactWeightsError: one would become infinite.
    """
    return require_exact(alpha, alpha.abs() < _LARGEST_GLOBAL, "global scales below 256")
