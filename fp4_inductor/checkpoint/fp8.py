"""FP8 matrices beside FP4 ones: ``X.weight float8_e4m3fn`` under scales that multiply. Decoded while they are read.

Scales are one number, one per row, or one per tile of ``weight_block_size``. Source: DeepSeek-V3's and V4's
published code (``weight_scale_inv`` multiplies, too), nvidia-modelopt 0.47, compressed-tensors 0.20.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..errors import CheckpointError
from ..quant.mxfp4 import decode_e8m0
from .files import CheckpointFiles
from .weights import PlainWeight

DESCRIPTION = "FP8 (float8_e4m3fn weight and its scale)"

_CODES = ".weight"
_SCALES = ("weight_scale", "weight_scale_inv", "scale")
_DEFAULT_TILE = (128, 128)


def find(files: CheckpointFiles) -> Iterator[PlainWeight]:
    """The weights of this layout.

    Raises:
        CheckpointError: a scale of a shape that is none of the three.
    """
    for key, codes in files.tensors.items():
        if not key.endswith(_CODES) or codes.dtype != torch.float8_e4m3fn or len(codes.shape) != 2:
            continue
        names = [f"{key.removesuffix(_CODES)}.{name}" for name in _SCALES]
        for scale in [name for name in names if name in files.tensors][:1]:
            yield _weight(files, key, scale)


def _weight(files: CheckpointFiles, key: str, scale_key: str) -> PlainWeight:
    (rows, columns), scale = files.tensors[key].shape, files.tensors[scale_key].shape
    said = files.quantization.get("weight_block_size")
    tile = tuple(said) if isinstance(said, list) and len(said) == 2 else _DEFAULT_TILE
    tiled = len(scale) == 2 and scale == (-(-rows // tile[0]), -(-columns // tile[1]))
    if scale not in ((), (1,), (rows,), (rows, 1)) and not tiled:
        raise CheckpointError(
            f"reading {DESCRIPTION}",
            needed=f"one scale, one for each row, or one for each {tile[0]} x {tile[1]}",
            got=f"scales {list(scale)} for a weight {[rows, columns]}",
            where=key,
        )

    def read() -> torch.Tensor:
        stored = files.read(scale_key)
        factor = decode_e8m0(stored.view(torch.uint8)) if stored.dtype == torch.float8_e8m0fnu else stored.float()
        if tiled and scale not in ((rows, 1), (1, 1)):
            factor = factor.repeat_interleave(tile[0], 0)[:rows].repeat_interleave(tile[1], 1)[:, :columns]
        elif factor.numel() > 1:
            factor = factor.reshape(rows, 1)
        value: torch.Tensor = files.read(key).float() * factor
        if not bool(value.isfinite().all()):
            raise CheckpointError(f"reading {DESCRIPTION}", needed="numbers", got="NaN or infinity", where=key)
        return value

    return PlainWeight(key, (rows, columns), torch.float32, (key, scale_key), read)
