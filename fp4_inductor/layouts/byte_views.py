"""The same bytes under the dtype that a kernel's signature asks for."""

from __future__ import annotations

import torch


def view_as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of a tensor as ``dtype``: codes as int64 (CUTLASS), e8m0 bits as float8_e4m3fn (TRTLLM), and back.

    Args:
        tensor: [..., C]; C times its item size is a multiple of ``dtype``'s.

    Returns:
        A new contiguous tensor of ``dtype``, [..., C * item size / dtype's item size].
    """
    return tensor.clone(memory_format=torch.contiguous_format).view(dtype)
