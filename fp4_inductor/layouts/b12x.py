"""What must hold of NVFP4 weights so that b12x's packing for bfloat16 activations, which FlashInfer does, is exact.

Packed block scales have five bits of exponent and three of mantissa, in the place of float16's, and none below 2.
All of a layer's are first multiplied by 2**7, and by the largest power of two that keeps the largest at 448 * 2**7 at
most; what is still below 2 becomes zero. Global scales are multiplied by 2**119 in float32.
"""

from __future__ import annotations

import torch

from ..formats import E4M3_MAX, E4M3_MIN
from .exactness import require_exact

_SMALLEST = 2.0**-6
_LARGEST_GLOBAL = 2.0**8
_MAGNITUDES = 0x7777_7777_7777_7777
"""Of the sixteen codes of a block, in one word."""


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
    bits = scale.view(torch.uint8)
    largest = bits.amax().view(scale.dtype).to(torch.float64).clamp(min=E4M3_MIN)
    factor = torch.exp2((E4M3_MAX / largest).log2().floor())
    # Bits of scales are in the order of the scales, and the smallest kept is a power of two, or below all of them.
    kept = bits >= (_SMALLEST / factor).to(scale.dtype).view(torch.uint8)
    zeros = codes.contiguous().view(torch.int64) & _MAGNITUDES == 0
    needed = "block scales within 2**-14 of the largest of all experts"
    return require_exact(bits, zeros | kept, needed).view(scale.dtype)


def require_packable_globals(alpha: torch.Tensor) -> torch.Tensor:
    """float32 [E] global scales that packing keeps finite.

    Raises:
        InexactWeightsError: one would become infinite.
    """
    return require_exact(alpha, alpha.abs() < _LARGEST_GLOBAL, "global scales below 256")
