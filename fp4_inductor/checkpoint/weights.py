"""A checkpoint's weights under the names that an unquantised one of the same model would give them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..errors import CheckpointError
from ..formats import E2M1_VALUES, E8M0_NAN, MXFP4, NVFP4, BlockFormat
from ..quant import PackedTensors, dequantize
from .files import CheckpointFiles

_E4M3_NAN = 0x7F
_LARGEST_WEIGHT = 2.0**18
"""No trained weight comes near it; one under the inverse of its global scale lies above it."""
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


def stacked(weight: Fp4Weight, num_experts: int) -> Fp4Weight:
    """A weight ``[E N, K]`` as ``[E, N, K]``; as it is where its rows are no multiple of E."""
    rows, k = weight.shape
    if rows % num_experts:
        return weight

    def read() -> PackedTensors:
        codes, scale, global_scale = weight.read()
        if global_scale is not None:
            global_scale = (
                global_scale.reshape(1, 1) if global_scale.numel() == 1 else global_scale.view(num_experts, -1)
            )
        return PackedTensors(
            codes.view(num_experts, -1, codes.shape[-1]), scale.view(num_experts, -1, scale.shape[-1]), global_scale
        )

    return replace(weight, shape=(num_experts, rows // num_experts, k), read=read)


def decoded(weight: Fp4Weight, dtype: torch.dtype) -> PlainWeight:
    """A weight for a module that looks up rows, which would decode all of them in every call."""
    return PlainWeight(
        weight.name, weight.shape, dtype, weight.keys, lambda: dequantize(*weight.read(), weight.format, dtype)
    )


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


def scaled_weight(
    files: CheckpointFiles, name: str, layout: str, keys: tuple[str, str, str], *, inverse: bool = False
) -> Fp4Weight:
    """The weight ``name`` of codes, block scales and, where the file has one, a global scale.

    Args:
        layout: its description.
        keys: of the three; codes are ``uint8 [N, K/2]``, ``[E, N, K/2]`` or ``[E, K/2, N]``.
        inverse: the global scale divides to dequantise.

    Raises:
        CheckpointError: parts that do not fit together, or scales that have two readings.
    """
    did, has_global = f"reading {layout}", keys[2] in files.tensors
    codes, scale = files.tensors[keys[0]], files.tensors[keys[1]]
    fmt, k_first = _oriented_format(did, scale.dtype, codes.shape, scale.shape, name)
    if fmt == MXFP4 and has_global:
        raise CheckpointError(
            did,
            needed="either MXFP4 (uint8 scales, no global one) or NVFP4 (e4m3 scales under a global one)",
            got=f"uint8 scales under {keys[2]}, which could be e8m0, e4m3 bits or ue5m3",
            where=name,
            now="export the checkpoint again in one of the two",
        )
    shape = (codes.shape[0], codes.shape[2], codes.shape[1]) if k_first else codes.shape

    def read() -> PackedTensors:
        number = _shaped_global_scale(did, files.read(keys[2]), shape, name) if has_global else None
        return packed(*_with_k_last(files.read(keys[0]), files.read(keys[1]), k_first), number, name, inverse=inverse)

    return Fp4Weight(name, layout, fmt, (*shape[:-1], 2 * shape[-1]), keys if has_global else keys[:2], read)


def _oriented_format(
    did: str, scale_dtype: torch.dtype, codes: tuple[int, ...], scale: tuple[int, ...], where: str
) -> tuple[BlockFormat, bool]:
    """The format, and whether codes and scales of stacked experts are ``[E, K/2, N]`` and ``[E, K/bs, N]``.

    A scale covers 8 or 16 bytes of codes along K, so at most one of the two readings has whole blocks.

    Raises:
        CheckpointError: neither has.
    """
    if len(codes) == len(scale) == 3:
        swapped = (codes[0], codes[2], codes[1]), (scale[0], scale[2], scale[1])
        try:
            return block_format(did, scale_dtype, codes, scale, where), False
        except CheckpointError:
            return block_format(did, scale_dtype, *swapped, where), True
    return block_format(did, scale_dtype, codes, scale, where), False


def _with_k_last(codes: torch.Tensor, scale: torch.Tensor, k_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[E, K/2, N]`` and scales ``[E, K/bs, N]`` with their axes in the usual order, where ``k_first``."""
    if not k_first:
        return codes, scale
    return codes.transpose(1, 2), scale.view(torch.uint8).transpose(1, 2).contiguous().view(scale.dtype)


def _shaped_global_scale(did: str, stored: torch.Tensor, shape: tuple[int, ...], where: str) -> torch.Tensor:
    """A global scale by the shape of its weight: one number for all, or for stacked experts one or a pair each.

    Args:
        stored: any shape of 1, of E or of 2 E numbers.
        shape: ``[N, K]`` or ``[E, N, K]``.

    Returns:
        ``[1]``, ``[1, 1]``, ``[E, 1]``, or for gate and up ``[E, 2]``.

    Raises:
        CheckpointError: another number of them.
    """
    if stored.numel() == 1:
        return stored.reshape(*[1] * (len(shape) - 1))
    if len(shape) == 3 and stored.shape[0] == shape[0] and stored.numel() in (shape[0], 2 * shape[0]):
        return stored.reshape(shape[0], -1)
    raise CheckpointError(
        did,
        needed="one global scale, or for stacked experts one or a pair for each",
        got=f"{list(stored.shape)} for a weight {list(shape)}",
        where=where,
    )


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
        if bits.numel() and int(bits.max()) >= _E4M3_NAN:
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
    if inverse:
        global_scale = multiplier(global_scale)
    _refuse_magnitudes(scale, global_scale, where, inverse)
    return PackedTensors(codes, scale, global_scale)


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


def divisor(multiplied: torch.Tensor) -> torch.Tensor:
    """The float32 number to store where readers divide: the inverse of ``multiplier``.

    Args:
        multiplied: ``float32 [...]``, what weights are multiplied by.

    Returns:
        ``float32 [...]``, such that ``multiplier`` gives ``multiplied`` again, or else the same bfloat16 weights.
    """
    nearest = torch.reciprocal(multiplied)
    candidates = [(nearest.view(torch.int32) + units).view(torch.float32) for units in (0, -1, 1, -2, 2)]
    products = _products().to(torch.float32)
    weights = (products * multiplied.unsqueeze(-1)).to(torch.bfloat16)
    chosen = nearest
    for candidate in reversed(candidates):
        same = ((products * multiplier(candidate).unsqueeze(-1)).to(torch.bfloat16) == weights).all(-1)
        chosen = torch.where(same, candidate, chosen)
    for candidate in reversed(candidates):
        chosen = torch.where(multiplier(candidate) == multiplied, candidate, chosen)
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


def _refuse_magnitudes(scale: torch.Tensor, global_scale: torch.Tensor, where: str, inverse: bool) -> None:
    """Refuse a global scale that seems to be the inverse of what its name says.

    Block scales reach 448 and weights lie near one, so what multiplies is far below one and what divides far above.
    """
    if not scale.numel():
        return
    largest = E2M1_VALUES[-1] * float(scale.view(torch.uint8).max().view(scale.dtype).float())
    if largest * float(global_scale.max()) > _LARGEST_WEIGHT:
        read, other = ("divides", "multiplies") if inverse else ("multiplies", "divides")
        raise CheckpointError(
            "reading global scales",
            needed=f"weights of at most {_LARGEST_WEIGHT:g}",
            got=f"up to {largest * float(global_scale.max()):.3g}, where the global scale {read} as this layout's does",
            where=where,
            now=f"it looks like one that {other}: export the checkpoint again, or give it the names of that layout",
        )
