"""compressed-tensors: ``X.weight_packed uint8 [N, K/2]`` beside ``X.weight_scale``; auto-round writes the same.

NVFP4 has e4m3 scales and a ``weight_global_scale`` that **divides** to dequantise; MXFP4 has e8m0 bits as uint8 and
no global scale. gate and up of one expert may have different global scales. Source: compressed-tensors 0.20,
compressors/nvfp4 and compressors/mxfp4.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..errors import CheckpointError
from ..formats import MXFP4
from ..quant import PackedTensors
from .files import CheckpointFiles
from .parts import require
from .weights import Fp4Weight, block_format, packed

DESCRIPTION = "compressed-tensors NVFP4 or MXFP4 (weight_packed and weight_scale)"

_CODES, _SCALE, _GLOBAL = ".weight_packed", ".weight_scale", ".weight_global_scale"


def find(files: CheckpointFiles) -> Iterator[Fp4Weight]:
    """The weights of this layout.

    Raises:
        CheckpointError: parts that are missing, or that do not fit together.
    """
    tensors = files.tensors
    bases = [
        key.removesuffix(_CODES)
        for key, stored in tensors.items()
        if key.endswith(_CODES) and stored.dtype == torch.uint8
    ]
    require(tensors, (base + _SCALE for base in bases), DESCRIPTION)
    is_e4m3 = {base: tensors[base + _SCALE].dtype == torch.float8_e4m3fn for base in bases}
    require(tensors, (base + _GLOBAL for base in bases if is_e4m3[base]), DESCRIPTION)
    for base in bases:
        yield _weight(files, base)


def _weight(files: CheckpointFiles, base: str) -> Fp4Weight:
    codes, scale = files.tensors[base + _CODES], files.tensors[base + _SCALE]
    fmt = block_format(f"reading {DESCRIPTION}", scale.dtype, codes.shape, scale.shape, base)
    has_global = base + _GLOBAL in files.tensors
    if fmt == MXFP4 and has_global:
        raise CheckpointError(
            f"reading {DESCRIPTION}",
            needed="either MXFP4 (uint8 scales, no global one) or NVFP4 (e4m3 scales under a global one)",
            got="uint8 scales under a global one, which could be e8m0, e4m3 bits or ue5m3",
            where=base,
            now="export the checkpoint again in one of the two",
        )
    keys = (base + _CODES, base + _SCALE, *([base + _GLOBAL] if has_global else []))

    def read() -> PackedTensors:
        global_scale = files.read(base + _GLOBAL).reshape(-1) if has_global else None
        return packed(files.read(keys[0]), files.read(keys[1]), global_scale, base, inverse=True)

    return Fp4Weight(base + ".weight", DESCRIPTION, fmt, (*codes.shape[:-1], 2 * codes.shape[-1]), keys, read)
