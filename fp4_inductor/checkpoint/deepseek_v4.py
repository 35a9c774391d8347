"""DeepSeek-V4's own layout: ``X.weight int8 [N, K/2]`` beside ``X.scale float8_e8m0fnu [N, K/32]``, MXFP4.

Source: transformers, models/deepseek_v4; DeepSeek's convert.py puts the even element in the low nibble.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..quant import PackedTensors
from .files import CheckpointFiles
from .weights import Fp4Weight, block_format, packed

DESCRIPTION = "DeepSeek-V4 MXFP4 (int8 weight and e8m0 scale)"

_CODES, _SCALE = ".weight", ".scale"
_E8M0 = (torch.float8_e8m0fnu, torch.uint8)


def find(files: CheckpointFiles) -> Iterator[Fp4Weight]:
    """The weights of this layout.

    Raises:
        CheckpointError: parts that do not fit together.
    """
    for key, codes in files.tensors.items():
        scale = files.tensors.get(key.removesuffix(_CODES) + _SCALE)
        if not key.endswith(_CODES) or scale is None:
            continue
        if codes.dtype in (torch.int8, torch.uint8) and scale.dtype in _E8M0:
            yield _weight(files, key, key.removesuffix(_CODES) + _SCALE)


def _weight(files: CheckpointFiles, key: str, scale_key: str) -> Fp4Weight:
    codes, scale = files.tensors[key], files.tensors[scale_key]
    fmt = block_format(f"reading {DESCRIPTION}", scale.dtype, codes.shape, scale.shape, key)

    def read() -> PackedTensors:
        return packed(files.read(key), files.read(scale_key), None, key)

    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    return Fp4Weight(key, DESCRIPTION, fmt, shape, (key, scale_key), read)
