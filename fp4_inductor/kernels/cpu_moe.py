"""Call the C++ kernel: a mixture-of-experts block on weights in row blocks."""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from math import inf
from typing import NamedTuple

import torch

from ..formats import BlockFormat
from ..spec import ActivationSpec
from .cpu_build import choose_isa, load_library

_KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
_BOUNDS = ("clamp", "clamp_activated", "softcap")
_MAX_SLOTS = 16384
"""Slots whose activations are held at once: beyond, tokens take turns, each as fast."""


_CALL = struct.Struct("13P6q7i4f0P")
"""``Call`` in moe.cpp: pointers, sizes, what kind of each, the activation's numbers, and what aligns them."""


class Weight(NamedTuple):
    """One weight of all experts in row blocks.

    Attributes:
        codes: uint8 [E, N/16, K/8, 16, 4]; scale: uint8 [E, N/16, K/bs, 16].
        factors, bias: float32 [E, N], or None.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    factors: torch.Tensor | None
    bias: torch.Tensor | None


@cache
def _kernel(isa: str) -> ctypes._FuncPointer:
    library = load_library(isa)
    assert library.fp4_call_bytes() == _CALL.size, "the structure is not that of moe.cpp"
    kernel = library.fp4_moe
    kernel.argtypes, kernel.restype = [ctypes.c_char_p], None
    return kernel


def run_experts(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: Weight,
    w2: Weight,
    activation: ActivationSpec,
    fmt: BlockFormat,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The block; h is kept in bfloat16 where activations are multiplied so, and in float32 elsewhere.

    Args:
        hidden: [T, H] bfloat16, float16 or float32.
        topk_ids: [T, k] int; ids outside the experts contribute nothing.
        topk_weights: [T, k] float.
        w13: rows of gate and up in turn, sixteen each, where it is gated.
        activation: with no RUNTIME field.

    Returns:
        [T, H] in ``out_dtype``.
    """
    isa = choose_isa(hidden.dtype)
    kernel = _kernel(isa)
    num_tokens, hidden_size = hidden.shape
    top_k = topk_ids.shape[1]
    intermediate_size = w2.codes.shape[2] * 8
    hidden = (hidden.float() if hidden.dtype == torch.float16 else hidden).contiguous()
    ids, weights = topk_ids.long().contiguous(), topk_weights.float().contiguous()
    out_bfloat16 = out_dtype == torch.bfloat16
    out = hidden.new_empty(num_tokens, hidden_size, dtype=out_dtype if out_bfloat16 else torch.float32)
    max_tokens = max(1, min(num_tokens, _MAX_SLOTS // top_k))
    input_bytes = 2 if isa == "avx512_bf16" else 4
    scratch_bytes = max_tokens * (
        top_k * (hidden_size + intermediate_size) * input_bytes + out_bfloat16 * hidden_size * 4
    )
    scratch = hidden.new_empty(scratch_bytes, dtype=torch.uint8)
    limit = inf if activation.limit is None else activation.limit
    call = _CALL.pack(
        *_pointers(w13),
        *_pointers(w2),
        hidden.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        out.data_ptr(),
        scratch.data_ptr(),
        num_tokens,
        max_tokens,
        top_k,
        len(w2.codes),
        hidden_size,
        intermediate_size,
        fmt.scale_encoding == "e4m3",
        hidden.dtype == torch.bfloat16,
        out_bfloat16,
        torch.get_num_threads(),
        _KINDS.index(activation.kind),
        _BOUNDS.index(activation.bound),
        activation.gated,
        activation.alpha,
        activation.beta,
        limit,
        limit if activation.up_limit is None else activation.up_limit,
    )
    kernel(call)
    return out if out.dtype == out_dtype else out.to(out_dtype)


def _pointers(weight: Weight) -> tuple[int, int, int, int]:
    codes, scale, factors, bias = weight
    return (
        codes.data_ptr(),
        scale.data_ptr(),
        0 if factors is None else factors.data_ptr(),
        0 if bias is None else bias.data_ptr(),
    )
