"""ModelOpt's names, which Quark shares: ``X.weight uint8`` beside ``X.weight_scale``, and ``weight_scale_2``.

NVFP4 has e4m3 scales, one per 16 or per 32, under a ``weight_scale_2`` that multiplies; MXFP4 has e8m0 bits as
uint8 and nothing above. A linear layer is ``[N, K/2]``. Fused experts put the suffixes after the parameter's own
name and are stored ``[E, N, K/2]``, or ``[E, K/2, N]`` where the module keeps K second; which of the two, only the
shapes of codes and scales together say. Source: nvidia-modelopt 0.47, torch/export; vLLM 0.33, quark.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..errors import CheckpointError
from ..formats import MXFP4, BlockFormat
from ..quant import PackedTensors
from .files import CheckpointFiles
from .parts import require
from .weights import Fp4Weight, block_format, packed

DESCRIPTION = "ModelOpt or Quark NVFP4 or MXFP4 (uint8 weight and weight_scale)"

_CODES = ".weight"


def find(files: CheckpointFiles) -> Iterator[Fp4Weight]:
    """The weights of this layout.

    Raises:
        CheckpointError: parts that are missing, or that do not fit together.
    """
    scales = {
        key: _join(key, "weight_scale")
        for key, stored in files.tensors.items()
        if stored.dtype == torch.uint8 and _join(key, "weight_scale") in files.tensors
    }
    is_e4m3 = [key for key, scale in scales.items() if files.tensors[scale].dtype == torch.float8_e4m3fn]
    require(files.tensors, (_join(key, "weight_scale_2") for key in is_e4m3), DESCRIPTION)
    for key, scale in scales.items():
        yield _weight(files, key, scale)


def _join(key: str, part: str) -> str:
    """``X.weight`` has ``X.part`` beside it, any other parameter ``X`` has ``X_part``."""
    return f"{key.removesuffix(_CODES)}.{part}" if key.endswith(_CODES) else f"{key}_{part}"


def _weight(files: CheckpointFiles, key: str, scale_key: str) -> Fp4Weight:
    global_key = _join(key, "weight_scale_2")
    has_global = global_key in files.tensors
    fmt, k_first = _read_shapes(files, key, scale_key)
    if fmt == MXFP4 and has_global:
        raise CheckpointError(
            f"reading {DESCRIPTION}",
            needed="either MXFP4 (uint8 scales, no weight_scale_2) or NVFP4 (e4m3 scales and weight_scale_2)",
            got="uint8 scales and weight_scale_2, which could be e8m0, e4m3 bits or ue5m3",
            where=key,
            now="export the checkpoint again in one of the two",
        )
    codes_shape = files.tensors[key].shape
    shape = (codes_shape[0], codes_shape[2], codes_shape[1]) if k_first else codes_shape

    def read() -> PackedTensors:
        codes, scale = files.read(key), files.read(scale_key)
        if k_first:
            codes, scale = codes.transpose(1, 2), scale.view(torch.uint8).transpose(1, 2).contiguous().view(scale.dtype)
        global_scale = _global_scale(files.read(global_key), shape, key) if has_global else None
        return packed(codes, scale, global_scale, key)

    keys = (key, scale_key, *([global_key] if has_global else []))
    return Fp4Weight(key, DESCRIPTION, fmt, (*shape[:-1], 2 * shape[-1]), keys, read)


def _read_shapes(files: CheckpointFiles, key: str, scale_key: str) -> tuple[BlockFormat, bool]:
    """The format, and whether codes and scales are ``[E, K/2, N]`` and ``[E, K/bs, N]``."""
    codes, scale = files.tensors[key].shape, files.tensors[scale_key].shape
    did, dtype = f"reading {DESCRIPTION}", files.tensors[scale_key].dtype
    if len(codes) == len(scale) == 3:
        as_stored, swapped = (codes, scale), ((codes[0], codes[2], codes[1]), (scale[0], scale[2], scale[1]))
        # A scale covers 8 or 16 bytes of codes along K, so at most one of the two readings has whole blocks.
        try:
            return block_format(did, dtype, *as_stored, key), False
        except CheckpointError:
            return block_format(did, dtype, *swapped, key), True
    return block_format(did, dtype, codes, scale, key), False


def _global_scale(stored: torch.Tensor, shape: tuple[int, ...], key: str) -> torch.Tensor:
    """One number for all, or for stacked experts one each, ``[E, 1]``, or a pair for gate and up, ``[E, 2]``."""
    if stored.numel() == 1:
        return stored.reshape(*[1] * (len(shape) - 1))
    if len(shape) == 3 and stored.shape[0] == shape[0] and stored.numel() in (shape[0], 2 * shape[0]):
        return stored.reshape(shape[0], -1)
    raise CheckpointError(
        f"reading {DESCRIPTION}",
        needed="one global scale, or for stacked experts one or a pair for each",
        got=f"{list(stored.shape)} for codes {list(shape)}",
        where=key,
    )
