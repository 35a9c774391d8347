"""Rows as TensorRT-LLM's generated MoE kernels take them, for an epilogue tile of 128 rows.

Within every 32 rows, new row n is old row ``(n % 8) * 4 + n / 8``; codes, block scales and biases move alike. Before
that, w13's rows stand in pairs, u0, g0, u1, g1, .... Scales are then tiled, and all of them, e8m0 too, are
typed float8_e4m3fn.
"""

from __future__ import annotations

import torch

from .scale_128x4 import from_scale_tiles, to_scale_tiles

BLOCK_ROWS = 32
_STRIPE = 8
"""New rows in a row that were old rows four apart."""


def shuffle_rows(rows: torch.Tensor) -> torch.Tensor:
    """Rows in the kernels' order.

    Args:
        rows: [E, N, ...] codes, block scales or biases in any dtype; N a multiple of 32.

    Returns:
        A new contiguous tensor of the same shape and dtype.
    """
    blocks: torch.Tensor = rows.unflatten(1, (-1, _STRIPE, BLOCK_ROWS // _STRIPE))
    return blocks.transpose(2, 3).clone(memory_format=torch.contiguous_format).flatten(1, 3)


def unshuffle_rows(rows: torch.Tensor) -> torch.Tensor:
    """Rows [E, N, ...] in their own order; the inverse of ``shuffle_rows``."""
    blocks: torch.Tensor = rows.unflatten(1, (-1, BLOCK_ROWS // _STRIPE, _STRIPE))
    return blocks.transpose(2, 3).clone(memory_format=torch.contiguous_format).flatten(1, 3)


def to_trtllm_scales(scale: torch.Tensor) -> torch.Tensor:
    """Block scales as the kernels read them: rows shuffled, then tiled.

    Args:
        scale: [E, N, S] e8m0 bits or float8_e4m3fn; w13's rows in pairs. N is a multiple of 128 and S of 4:
            the kernel tells the block size from the number of scales, so there is no room for padding.

    Returns:
        float8_e4m3fn [E, N, S], a new contiguous tensor.
    """
    tiles = to_scale_tiles(shuffle_rows(scale))
    assert tiles.shape == scale.shape, "the plan pads to whole tiles"
    return tiles.view(torch.float8_e4m3fn)


def from_trtllm_scales(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Block scales [E, N, S] of ``dtype``, uint8 or float8_e4m3fn; the inverse of ``to_trtllm_scales``."""
    return unshuffle_rows(from_scale_tiles(scale, *scale.shape[1:])).view(dtype)
