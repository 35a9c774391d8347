"""FP8 matrices beside FP4 ones: ``X.weight float8_e4m3fn`` under scales that multiply. Decoded while they are read.

Scales are one number, one per row, one per tile of ``weight_block_size``, or one per group of a row, of which MXFP8's
are bits of e8m0 per 32. Source: DeepSeek-V3's and V4's published code (``weight_scale_inv`` multiplies, too),
nvidia-modelopt 0.47, compressed-tensors 0.20.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..errors import CheckpointError
from ..quant.mxfp4 import decode_e8m0
from .files import CheckpointFiles
from .parts import weight_groups
from .weights import PlainWeight

DESCRIPTION = "FP8 (float8_e4m3fn weight and its scale)"

_CODES = ".weight"
_SCALES = ("weight_scale", "weight_scale_inv", "scale")
_DEFAULT_TILE = (128, 128)
_MX_GROUP = 32
_BITS = (torch.uint8, torch.float8_e8m0fnu)


def find(files: CheckpointFiles) -> Iterator[PlainWeight]:
    """The weights of this layout.

    Raises:
        CheckpointError: a scale of a shape that is none of these.
    """
    for key, codes in files.tensors.items():
        if not key.endswith(_CODES) or codes.dtype != torch.float8_e4m3fn or len(codes.shape) != 2:
            continue
        names = [f"{key.removesuffix(_CODES)}.{name}" for name in _SCALES]
        for scale in [name for name in names if name in files.tensors][:1]:
            yield _weight(files, key, scale)


def _weight(files: CheckpointFiles, key: str, scale_key: str) -> PlainWeight:
    (rows, columns), scale = files.tensors[key].shape, files.tensors[scale_key]
    tile = _tile(files.quantization)
    covered = _covered((rows, columns), scale.shape, tile, scale.dtype in _BITS)
    if covered is None:
        raise CheckpointError(
            f"reading {DESCRIPTION}",
            needed=f"one scale, one for each row, one for each {tile[0]} x {tile[1]}, or one for each group of a row",
            got=f"scales {list(scale.shape)} of {scale.dtype} for a weight {[rows, columns]}",
            where=key,
        )

    def read() -> torch.Tensor:
        stored = files.read(scale_key).reshape(-(-rows // covered[0]), -(-columns // covered[1]))
        factor = decode_e8m0(stored.view(torch.uint8)) if stored.dtype in _BITS else stored.float()
        factor = factor.repeat_interleave(covered[0], 0)[:rows].repeat_interleave(covered[1], 1)[:, :columns]
        value: torch.Tensor = files.read(key).float() * factor
        if not bool(value.isfinite().all()):
            raise CheckpointError(f"reading {DESCRIPTION}", needed="numbers", got="NaN or infinity", where=key)
        return value

    return PlainWeight(key, (rows, columns), torch.float32, (key, scale_key), read)


def _tile(quantization: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns under one scale, as the config says."""
    groups = (group["weights"].get("block_structure") for group in weight_groups(quantization))
    for tile in (quantization.get("weight_block_size"), *groups):
        if isinstance(tile, list) and len(tile) == 2 and all(isinstance(size, int) and size > 0 for size in tile):
            return tile[0], tile[1]
    return _DEFAULT_TILE


def _covered(
    shape: tuple[int, int], scale: tuple[int, ...], tile: tuple[int, int], is_bits: bool
) -> tuple[int, int] | None:
    """Rows and columns that one scale covers, None where the shapes have no such reading."""
    rows, columns = shape
    if len(scale) == 4 and scale[1] == scale[3] == 1:  # as ModelOpt keeps tiles
        scale = (scale[0], scale[2])
    if scale in ((), (1,), (1, 1)):
        return rows, columns
    if scale == (-(-rows // tile[0]), -(-columns // tile[1])):
        return tile
    if scale in ((rows,), (rows, 1)):
        return 1, columns
    if len(scale) != 2 or scale[0] != rows or columns % scale[1]:
        return None
    group = columns // scale[1]
    return (1, group) if group == _MX_GROUP or not is_bits else None
