"""The gpt-oss layout: ``*_blocks uint8 [E, N, K/32, 16]`` and ``*_scales uint8 [E, N, K/32]``, MXFP4.

Codes are canonical once the last two axes are one, also where the module stores ``[E, K, N]``; rows
keep the module's own gate and up order (interleaved). Source: transformers, integrations/mxfp4.py.
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

DESCRIPTION = "gpt-oss MXFP4 as published for transformers (*_blocks and *_scales)"

_BLOCKS, _SCALES = "_blocks", "_scales"


def find(files: CheckpointFiles) -> Iterator[Fp4Weight]:
    """The weights of this layout.

    Raises:
        CheckpointError: parts that are missing, or that do not fit together.
    """
    names = [
        key.removesuffix(_BLOCKS)
        for key, stored in files.tensors.items()
        if key.endswith(_BLOCKS) and stored.dtype == torch.uint8 and len(stored.shape) == 4
    ]
    require(files.tensors, (name + _SCALES for name in names), DESCRIPTION)
    for name in names:
        yield blocks_weight(files, name, name + _BLOCKS, name + _SCALES, DESCRIPTION)


def blocks_weight(files: CheckpointFiles, name: str, blocks: str, scales: str, layout: str) -> Fp4Weight:
    """The weight ``name`` of blocks ``uint8 [E, N, K/32, 16]`` and their scales ``uint8 [E, N, K/32]``.

    Raises:
        CheckpointError: shapes or dtypes that do not fit together.
    """
    *rows, count, size = files.tensors[blocks].shape
    scale = files.tensors[scales]
    fmt = block_format(f"reading {layout}", scale.dtype, (*rows, count * size), scale.shape, blocks)
    if fmt != MXFP4:
        raise CheckpointError(f"reading {layout}", needed="e8m0 scales", got=str(scale.dtype), where=scales)

    def read() -> PackedTensors:
        return packed(files.read(blocks).flatten(-2), files.read(scales), None, scales)

    return Fp4Weight(name, layout, fmt, (*rows, 2 * count * size), (blocks, scales), read)
