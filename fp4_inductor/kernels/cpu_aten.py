"""FP4 linear layers on a CPU in plain ATen: weights are decoded a cache-sized chunk of rows at a time.

A byte holds two weights, so one lookup in a 256-entry table of *pairs* decodes both; that is an order
of magnitude faster than a lookup a nibble. Chunks that stay in the L2 cache are four times faster to
decode than whole matrices, and bound the memory that decoding takes.
"""

from __future__ import annotations

import functools

import torch

from ..formats import E2M1_VALUES, E8M0_BIAS, E8M0_NAN

CHUNK_WEIGHTS = 1 << 19
"""Weights decoded at once: 1 MiB of indices and 1 MiB of bfloat16, about an L2 cache."""


def gemm_dtype(act_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which activations of ``act_dtype`` are multiplied: one in which every weight is exact.

    bfloat16 only where the processor multiplies it natively; elsewhere, and for float16, whose range does
    not hold every MXFP4 weight, float32.
    """
    native = torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if act_dtype == torch.bfloat16 and native else torch.float32


@functools.cache
def _pair_table(dtype: torch.dtype) -> torch.Tensor:
    """The two weights of each byte, low nibble first, as one integer of twice ``dtype``'s size, [256]."""
    with torch.inference_mode(False):  # an inference tensor in the cache would leak into every later call
        values = torch.tensor(E2M1_VALUES, dtype=dtype, device="cpu")
        values = torch.cat((values, -values))
        byte = torch.arange(256, device="cpu")
        pairs = torch.stack((values[byte & 15], values[byte >> 4]), dim=-1)
        return pairs.view(torch.int32 if dtype.itemsize == 2 else torch.int64).view(256)


@functools.cache
def _e8m0_table(dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False):
        table = torch.exp2(torch.arange(256, dtype=torch.float64, device="cpu") - E8M0_BIAS).to(dtype)
        table[E8M0_NAN] = torch.nan
        return table


def decode_rows(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes times block scales, exact in bfloat16 and float32.

    Args:
        codes: uint8 [N, K/2].
        scale: [N, K/bs], uint8 bits of e8m0 or float8_e4m3fn.
        dtype: bfloat16 or float32.

    Returns:
        [N, K] in ``dtype``.
    """
    rows, blocks = scale.shape
    if scale.dtype == torch.uint8:
        factor = _e8m0_table(dtype).index_select(0, scale.flatten().int()).view(rows, blocks, 1)
    else:
        factor = scale.to(dtype).unsqueeze(-1)
    pairs = _pair_table(dtype).index_select(0, codes.flatten().int())
    return pairs.view(dtype).view(rows, blocks, -1).mul_(factor).view(rows, -1)


def fp4_linear(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``x @ W.T`` accumulated in float32, without the global scale.

    Args:
        x: [m, K], bfloat16 or float32.
        codes: uint8 [N, K/2].
        scale: [N, K/bs], uint8 bits of e8m0 or float8_e4m3fn.

    Returns:
        [m, N] in the dtype of ``x``.
    """
    rows = codes.shape[0]
    out = x.new_empty(x.shape[0], rows)
    step = max(1, CHUNK_WEIGHTS // x.shape[1])
    for start in range(0, rows, step):
        chunk = slice(start, start + step)
        weight = decode_rows(codes[chunk], scale[chunk], x.dtype)
        torch.mm(x, weight.T, out=out[:, chunk])
    return out
