"""compressed-tensors: ``X_packed uint8 [N, K/2]`` beside ``X_scale``; auto-round writes the same.

``X`` is the ``weight`` of a module, or fused experts: ``[E, N, K/2]``, ``[E, K/2, N]`` or ``[E N, K/2]``.
NVFP4 has e4m3 scales and an ``X_global_scale`` that **divides** to dequantise; MXFP4 has e8m0 bits as uint8 and no
global scale. gate and up of one expert may have different global scales. Source: compressed-tensors 0.20,
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
from .weights import Fp4Weight, oriented_format, packed, shaped_global_scale, with_k_last

DESCRIPTION = "compressed-tensors NVFP4 or MXFP4 (weight_packed and weight_scale)"

_CODES, _SCALE, _GLOBAL = "_packed", "_scale", "_global_scale"


def find(files: CheckpointFiles) -> Iterator[Fp4Weight]:
    """The weights of this layout.

    Raises:
        CheckpointError: parts that are missing, or that do not fit together.
    """
    tensors = files.tensors
    names = [
        key.removesuffix(_CODES)
        for key, stored in tensors.items()
        if key.endswith(_CODES) and stored.dtype == torch.uint8
    ]
    require(tensors, (name + _SCALE for name in names), DESCRIPTION)
    is_e4m3 = {name: tensors[name + _SCALE].dtype == torch.float8_e4m3fn for name in names}
    require(tensors, (name + _GLOBAL for name in names if is_e4m3[name]), DESCRIPTION)
    for name in names:
        yield _weight(files, name)


def _weight(files: CheckpointFiles, name: str) -> Fp4Weight:
    codes, scale = files.tensors[name + _CODES], files.tensors[name + _SCALE]
    did = f"reading {DESCRIPTION}"
    fmt, k_first = oriented_format(did, scale.dtype, codes.shape, scale.shape, name)
    has_global = name + _GLOBAL in files.tensors
    if fmt == MXFP4 and has_global:
        raise CheckpointError(
            did,
            needed="either MXFP4 (uint8 scales, no global one) or NVFP4 (e4m3 scales under a global one)",
            got="uint8 scales under a global one, which could be e8m0, e4m3 bits or ue5m3",
            where=name,
            now="export the checkpoint again in one of the two",
        )
    shape = (codes.shape[0], codes.shape[2], codes.shape[1]) if k_first else codes.shape
    keys = (name + _CODES, name + _SCALE, *([name + _GLOBAL] if has_global else []))

    def read() -> PackedTensors:
        number = shaped_global_scale(did, files.read(name + _GLOBAL), shape, name) if has_global else None
        return packed(*with_k_last(files.read(keys[0]), files.read(keys[1]), k_first), number, name, inverse=True)

    return Fp4Weight(name, DESCRIPTION, fmt, (*shape[:-1], 2 * shape[-1]), keys, read)
