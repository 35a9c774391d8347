"""torchao's serialised tensors: ``X._weight_qdata``, ``X._weight_scale``, and JSON about each in the file's metadata.

NVFP4Tensor has e4m3 scales per 16 under an optional ``per_tensor_scale`` that multiplies, MXTensor e8m0 per 32. The
metadata says whether scales are in tiles of 128 rows by four; the tiles of stacked experts run over all their rows.
Source: torchao 0.18, prototype/safetensors and prototype/mx_formats.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from ..errors import CheckpointError
from ..formats import NVFP4
from ..layouts.padding import round_up
from ..layouts.scale_128x4 import TILE_ROWS, TILE_SCALES, from_scale_tiles
from ..quant import PackedTensors
from .files import CheckpointFiles
from .parts import require
from .weights import Fp4Weight, block_format, packed

DESCRIPTION = "torchao NVFP4 or MXFP4 (_weight_qdata and _weight_scale)"

_CODES = re.compile(r"(.+)\._(\w+)_qdata")
_E2M1 = "float4_e2m1fn_x2"


def find(files: CheckpointFiles) -> Iterator[Fp4Weight]:
    """The weights of this layout.

    Raises:
        CheckpointError: parts that are missing, that do not fit together, or of a format that is not FP4.
    """
    matches = [match for key in files.tensors if (match := _CODES.fullmatch(key))]
    prefixes = {f"{match[1]}.{match[2]}": match[0].removesuffix("qdata") for match in matches}
    require(files.tensors, (prefix + "scale" for prefix in prefixes.values()), DESCRIPTION)
    for name, prefix in prefixes.items():
        yield _weight(files, name, prefix)


def _weight(files: CheckpointFiles, name: str, prefix: str) -> Fp4Weight:
    kind, said = _described(files, name)
    codes, scale = files.tensors[prefix + "qdata"], files.tensors[prefix + "scale"]
    size = said.get("block_size")
    is_fp4 = kind == "NVFP4Tensor" or (kind == "MXTensor" and said.get("elem_dtype", {}).get("_data") == _E2M1)
    if not is_fp4 or codes.dtype != torch.uint8 or size not in (16, 32) or (2 * codes.shape[-1]) % size:
        _refuse(name, "NVFP4Tensor, or MXTensor of e2m1 elements, in whole blocks", f"{kind} {said}")
    natural = (*codes.shape[:-1], 2 * codes.shape[-1] // size)
    fmt = block_format(f"reading {DESCRIPTION}", scale.dtype, codes.shape, natural, name)
    swizzled = said.get("is_swizzled_scales")
    if not isinstance(swizzled, bool):
        _refuse(name, "is_swizzled_scales in the metadata", "none: scales could be in rows or in tiles")
    rows = math.prod(natural[:-1])
    tiles = (1, round_up(rows, TILE_ROWS), round_up(natural[-1], TILE_SCALES))
    if math.prod(scale.shape) != math.prod(tiles) if swizzled else scale.shape != natural:
        _refuse(name, f"scales {list(tiles if swizzled else natural)}", str(list(scale.shape)))
    parts = ("qdata", "scale", "per_tensor_scale", "act_per_tensor_scale")
    keys = tuple(prefix + part for part in parts if prefix + part in files.tensors)

    def read() -> PackedTensors:
        scales = files.read(prefix + "scale")
        if swizzled:
            in_rows = from_scale_tiles(scales.view(torch.uint8).reshape(tiles), rows, natural[-1])
            scales = in_rows.reshape(natural).view(scales.dtype)
        number = None
        if prefix + "per_tensor_scale" in files.tensors:
            number = files.read(prefix + "per_tensor_scale").reshape(-1, *[1] * (len(natural) - 2))
        elif fmt == NVFP4:
            number = torch.ones([1] * (len(natural) - 1), dtype=torch.float32, device="cpu")
        return packed(files.read(prefix + "qdata"), scales, number, name)

    return Fp4Weight(name, DESCRIPTION, fmt, (*codes.shape[:-1], 2 * codes.shape[-1]), keys, read)


def _described(files: CheckpointFiles, name: str) -> tuple[str, dict[str, Any]]:
    """What the metadata says of a tensor: its class, and the class's attributes."""
    try:
        content = json.loads(files.metadata[name])
        kind, said = content["_type"], content["_data"]
    except (KeyError, TypeError, ValueError, RecursionError):
        kind, said = None, None
    if not isinstance(kind, str) or not isinstance(said, dict):
        _refuse(name, "torchao's description in the file's metadata", "none: scales could be in rows or in tiles")
    return kind, said


def _refuse(name: str, needed: str, got: str) -> NoReturn:
    now = "save the model again with torchao's own safetensors support, in NVFP4 or MXFP4"
    raise CheckpointError(f"reading {DESCRIPTION}", needed=needed, got=got, where=name, now=now)
