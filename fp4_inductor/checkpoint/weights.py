"""A checkpoint's weights under the names that an unquantised one of the same model would give them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import CheckpointError
from ..formats import E2M1_VALUES, E8M0_NAN, MXFP4, NVFP4, BlockFormat
from ..quant import PackedTensors

_E4M3_NAN = 0x7F
_BLOCK_SIZES = {torch.uint8: (32,), torch.float8_e8m0fnu: (32,), torch.float8_e4m3fn: (16, 32)}


@dataclass(frozen=True, slots=True)
class Fp4Weight:
    """A weight in FP4, of which only the headers are known until it is read.

    Attributes:
        name: as an unquantised checkpoint would call it.
        layout: the description of the layout that it was recognised by.
        format: what its blocks decode by, once read.
        shape: ``[N, K]`` or ``[E, N, K]``, whichever way the file stores it.
        keys: its tensors in the file.
        read: gives them in canonical form; the global scale is ``[1]``, ``[N]``, ``[E, 1]``, ``[E, N]``, or a pair
            for gate and up, ``[E, 2]``.
    """

    name: str
    layout: str
    format: BlockFormat
    shape: tuple[int, ...]
    keys: tuple[str, ...]
    read: Callable[[], PackedTensors]


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """A weight that is read as it is, or decoded while it is read."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    keys: tuple[str, ...]
    read: Callable[[], torch.Tensor]


Weight = Fp4Weight | PlainWeight


def block_format(
    did: str, scale_dtype: torch.dtype, codes: tuple[int, ...], scale: tuple[int, ...], where: str
) -> BlockFormat:
    """The format of codes under a scale, by the scale's dtype and the two shapes alone.

    Args:
        scale_dtype: uint8 and float8_e8m0fnu are powers of two, float8_e4m3fn are numbers.
        codes: ``[..., N, K/2]``, shape of the codes.
        scale: ``[..., N, K/bs]``, shape of the scales.

    Raises:
        CheckpointError: shapes that are no blocks of 32, or of 16 where scales are e4m3.
    """
    k = 2 * codes[-1]
    sizes = _BLOCK_SIZES.get(scale_dtype, ())
    if not any(codes[:-1] == scale[:-1] and scale[-1] * size == k for size in sizes):
        raise CheckpointError(
            did,
            needed="codes [..., N, K/2] and scales [..., N, K/32] of e8m0, or [..., N, K/16] or [..., N, K/32] of e4m3",
            got=f"{scale_dtype} scales {list(scale)} for codes {list(codes)}, K = {k}",
            where=where,
            now="a K that is no multiple of the block has no standard layout: quantise to whole blocks",
        )
    return NVFP4 if scale_dtype == torch.float8_e4m3fn else MXFP4


def packed(
    codes: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None, where: str, *, inverse: bool = False
) -> PackedTensors:
    """Codes and scales in canonical form, after a look at every scale.

    Args:
        codes: ``[..., N, K/2]``, uint8 or int8.
        scale: ``[..., N, K/bs]``: bits of e8m0 as uint8 or float8_e8m0fnu, or float8_e4m3fn. One e4m3 scale per 32
            becomes two equal ones per 16, which decode to the same numbers.
        global_scale: one number, or float32 that broadcasts to ``[..., N]``; None where there is none.
        inverse: ``global_scale`` divides to dequantise.

    Raises:
        CheckpointError: a scale that is NaN or negative, or a global scale that is not a number above zero.
    """
    codes = codes.contiguous().view(torch.uint8)
    bits = scale.contiguous().view(torch.uint8)
    if scale.dtype == torch.float8_e4m3fn:
        _refuse_scales(bits & _E4M3_NAN == _E4M3_NAN, f"NaN (byte {_E4M3_NAN} or 255)", where)
        _refuse_scales(bits > _E4M3_NAN, "negative", where)
        scale = bits.repeat_interleave(2, dim=-1) if bits.shape[-1] * 16 == codes.shape[-1] else bits
        scale = scale.view(torch.float8_e4m3fn)
    else:
        _refuse_scales(bits == E8M0_NAN, f"NaN (byte {E8M0_NAN})", where)
        scale = bits
    if global_scale is None:
        return PackedTensors(codes, scale, None)
    global_scale = global_scale.to(torch.float32)
    if not bool((global_scale.isfinite() & (global_scale >= 0)).all()) or (inverse and not bool(global_scale.all())):
        raise CheckpointError(
            "reading global scales",
            needed="finite numbers above zero",
            got=str(global_scale.flatten()[:4].tolist()),
            where=where,
            now="the exporter wrote a broken scale: export the checkpoint again",
        )
    return PackedTensors(codes, scale, multiplier(global_scale) if inverse else global_scale)


def multiplier(divisor: torch.Tensor) -> torch.Tensor:
    """The float32 global scale under which every weight is the bfloat16 that division would have given.

    The nearest reciprocal misses it for about one scale in thirty: an exporter divides 2688 by a bfloat16 maximum,
    so products of code and scale lie at the middle between two bfloat16, and the reciprocal's own rounding decides.
    A neighbour of the reciprocal then lies on the right side.

    Args:
        divisor: ``float32 [...]``, what an exporter stores.

    Returns:
        ``float32 [...]``, at most two units in the last place from ``1 / divisor``.
    """
    products = _products()
    wanted = (products / divisor.double().unsqueeze(-1)).to(torch.float32).to(torch.bfloat16)
    nearest = torch.reciprocal(divisor)
    chosen = nearest
    missing = divisor > 0
    for units in (0, -1, 1, -2, 2):
        candidate = (nearest.view(torch.int32) + units).view(torch.float32)
        hits = ((products.to(torch.float32) * candidate.unsqueeze(-1)).to(torch.bfloat16) == wanted).all(-1)
        chosen = torch.where(missing & hits, candidate, chosen)
        missing = missing & ~hits
        if not bool(missing.any()):
            break
    return chosen


@functools.cache
def _products() -> torch.Tensor:
    """Every positive product of an e2m1 and an e4m3 number, float64."""
    scales = torch.arange(1, _E4M3_NAN, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).double()
    magnitudes = torch.tensor(E2M1_VALUES[1:], dtype=torch.float64, device="cpu")
    products: torch.Tensor = torch.outer(magnitudes, scales).unique()
    return products


def _refuse_scales(wrong: torch.Tensor, what: str, where: str) -> None:
    if bool(wrong.any()):
        raise CheckpointError(
            "reading block scales",
            needed="numbers above zero",
            got=f"{int(wrong.sum())} that are {what}",
            where=where,
            now="the exporter wrote a broken scale: export the checkpoint again",
        )
