"""Weights seen as blocks along K."""

from __future__ import annotations

import torch

from ..errors import QuantizationError
from ..formats import BlockFormat


def check_blocks(weight: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """``weight`` in float32 and contiguous, its last axis split into blocks.

    Args:
        weight: ``float [..., K]``.

    Returns:
        ``float32 [..., K/bs, bs]``.

    Raises:
        QuantizationError: not a floating dtype, K is not a multiple of the block size, or a value is not finite.
    """
    did = f"quantising a tensor of shape {list(weight.shape)} to {fmt}"
    if not weight.is_floating_point():
        raise QuantizationError(did, needed="a floating-point tensor", got=str(weight.dtype))
    size = weight.shape[-1]
    if size == 0 or size % fmt.block_size:
        raise QuantizationError(did, needed=f"a last axis that is a multiple of {fmt.block_size}", got=str(size))
    values = weight.to(torch.float32).contiguous()
    if not bool(torch.isfinite(values).all()):
        bad = int((~torch.isfinite(values)).sum())
        raise QuantizationError(did, needed="finite values (in float32)", got=f"{bad} that are NaN or infinite")
    return split_blocks(values, fmt.block_size)


def split_blocks(values: torch.Tensor, block_size: int) -> torch.Tensor:
    """``[..., K]`` as ``[..., K/bs, bs]``."""
    return values.reshape(*values.shape[:-1], values.shape[-1] // block_size, block_size)
