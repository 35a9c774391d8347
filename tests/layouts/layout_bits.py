"""Random bits of any dtype, equality of bits, and what every layout function promises."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx.experimental.proxy_tensor import make_fx


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Bytes below 120, so that no dtype reads them as NaN."""
    bits = torch.randint(0, 120, (*shape, dtype.itemsize), dtype=torch.uint8)
    return bits.view(dtype).squeeze(-1)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = [tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8) for tensor in (a, b)]
    return torch.equal(*bits)


def assert_prepares(function: Callable[..., torch.Tensor], *given: torch.Tensor) -> torch.Tensor:
    """The result of a layout function, which is new, contiguous, traceable and deaf to strides."""
    kept = [tensor.clone() for tensor in given]
    out = function(*given)
    assert out.is_contiguous()
    for tensor, before in zip(given, kept, strict=True):
        assert out.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        assert same_bits(tensor, before)
    for mode in ("real", "fake"):
        traced = make_fx(function, tracing_mode=mode)(*given)
        assert same_bits(traced(*given), out)
    strided = [torch.stack((tensor, tensor), dim=-1)[..., 0] for tensor in given]
    assert same_bits(function(*strided), out)
    return out
