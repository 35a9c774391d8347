"""Zero rows and columns up to what a kernel's tiles need, and back.

Zeros are exact: a zero code is a zero weight under any finite scale, so padded columns add nothing to a product, and
padded rows of w13 meet zero columns of w2. Every function also crops, so its inverse is itself at the old size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .gate_up import RowOrder, join_gate_up, split_gate_up


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``size``."""
    return -(-size // multiple) * multiple


def fit_rows(rows: torch.Tensor, size: int) -> torch.Tensor:
    """[E, size, ...] from [E, N, ...] of any dtype: zero rows behind the given ones, or only the first of them."""
    behind = (0, 0) * (rows.dim() - 2)
    return _pad(rows, (*behind, 0, size - rows.shape[1]))


def fit_columns(rows: torch.Tensor, size: int) -> torch.Tensor:
    """[E, N, size] from [E, N, S] codes (a column is a byte) or block scales: zero columns behind, or the first."""
    return _pad(rows, (0, size - rows.shape[-1]))


def fit_gate_up(rows: torch.Tensor, order: RowOrder, intermediate_size: int) -> torch.Tensor:
    """[E, 2 * intermediate_size, ...] from [E, 2I, ...] in ``order``: gate and up rows padded or cropped, each."""
    gate, up = (fit_rows(half, intermediate_size) for half in split_gate_up(rows, order))
    return join_gate_up(gate, up, order)


def _pad(tensor: torch.Tensor, amounts: tuple[int, ...]) -> torch.Tensor:
    """A new contiguous tensor with zero bits at the ends; one-byte floats go as their bits, which can be padded."""
    bits = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return F.pad(bits, amounts).contiguous().view(tensor.dtype)
