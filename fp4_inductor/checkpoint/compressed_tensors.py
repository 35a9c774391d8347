"""compressed-tensors: ``X_packed uint8 [N, K/2]`` beside ``X_scale``; auto-round writes the same.

``X`` is the ``weight`` of a module, or fused experts: ``[E, N, K/2]``, ``[E, K/2, N]`` or ``[E N, K/2]``.
NVFP4 has e4m3 scales and an ``X_global_scale`` that **divides** to dequantise; MXFP4 has e8m0 bits as uint8 and no
global scale. gate and up of one expert may have different global scales. Source: compressed-tensors 0.20,
compressors/nvfp4 and compressors/mxfp4.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .files import CheckpointFiles
from .parts import require
from .weights import Fp4Weight, scaled_weight

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
        keys = (name + _CODES, name + _SCALE, name + _GLOBAL)
        yield scaled_weight(files, name, DESCRIPTION, keys, inverse=True)
