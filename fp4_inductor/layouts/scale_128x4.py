"""Block scales in tiles of 128 rows by four scales, as matrix instructions with block scales read them.

A tile is 512 bytes in one piece, in which the four scales of a row stand together, then rows 32 apart, then the
next row:

    byte(row, s) = ((row / 128) * (S / 4) + s / 4) * 512 + (row % 32) * 16 + (row % 128) / 32 * 4 + s % 4

Rows are padded with zeros to a multiple of 128, scales to one of 4. CuTe kernels take the same bytes as a
six-dimensional view, whose strides are what they read by. A view has no strides of its own once a compiler has made
it a contiguous constant, so ``mma_scale_view`` belongs where the kernel is called, and the tiles are the constant.
"""

from __future__ import annotations

import torch

from .padding import fit_columns, fit_rows, round_up

TILE_ROWS = 128
TILE_SCALES = 4
_STACK = 32
"""Rows of a tile that share the place of a byte within 16."""


def to_scale_tiles(scale: torch.Tensor) -> torch.Tensor:
    """Tiled block scales from canonical ones.

    Args:
        scale: [E, N, S], one byte each: e8m0 bits or float8_e4m3fn.

    Returns:
        [E, Np, Sp] in the same dtype, contiguous; N and S rounded up. Its rows are bytes in tile order, not scales
        of a row.
    """
    padded = fit_columns(fit_rows(scale, round_up(scale.shape[1], TILE_ROWS)), round_up(scale.shape[2], TILE_SCALES))
    num_experts, rows, columns = padded.shape
    tiles = padded.view(num_experts, rows // TILE_ROWS, 4, _STACK, columns // TILE_SCALES, TILE_SCALES)
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(padded.shape)


def from_scale_tiles(tiles: torch.Tensor, rows: int, scales: int) -> torch.Tensor:
    """Canonical block scales [E, rows, scales] from tiles [E, Np, Sp]; the inverse of ``to_scale_tiles``."""
    num_experts, padded_rows, columns = tiles.shape
    shape = (num_experts, padded_rows // TILE_ROWS, columns // TILE_SCALES, _STACK, 4, TILE_SCALES)
    padded = tiles.reshape(shape).permute(0, 1, 4, 3, 2, 5).reshape(tiles.shape)
    return padded[:, :rows, :scales].clone(memory_format=torch.contiguous_format)


def mma_scale_view(tiles: torch.Tensor) -> torch.Tensor:
    """The view of tiles [E, Np, Sp] that CuTe kernels take: [32, 4, Np/128, 4, Sp/4, E], not contiguous."""
    num_experts, rows, columns = tiles.shape
    shape = (num_experts, rows // TILE_ROWS, columns // TILE_SCALES, _STACK, 4, TILE_SCALES)
    return tiles.view(shape).permute(3, 4, 1, 5, 2, 0)


def from_mma_scale_view(view: torch.Tensor) -> torch.Tensor:
    """Tiles [E, Np, Sp] from the view, whatever its strides; the inverse of ``mma_scale_view``. A new tensor."""
    tiles = view.permute(5, 2, 4, 0, 1, 3)
    num_experts, row_tiles, column_tiles = tiles.shape[:3]
    shape = (num_experts, row_tiles * TILE_ROWS, column_tiles * TILE_SCALES)
    return tiles.clone(memory_format=torch.contiguous_format).view(shape)
