"""ModelOpt's names, which Quark shares: ``X.weight uint8`` beside ``X.weight_scale``, and ``weight_scale_2``.

NVFP4 has e4m3 scales, one per 16 or per 32, under a ``weight_scale_2`` that multiplies; MXFP4 has e8m0 bits as
uint8 and nothing above. A linear layer is ``[N, K/2]``. Fused experts put the suffixes after the parameter's own
name and are stored ``[E, N, K/2]``, or ``[E, K/2, N]`` where the module keeps K second; which of the two, only the
shapes of codes and scales together say. Inkling's experts have ``X.scale`` and ``X.scale2`` instead. Source:
nvidia-modelopt 0.47, torch/export; vLLM 0.33, quark and inkling.
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

DESCRIPTION = "ModelOpt or Quark NVFP4 or MXFP4 (uint8 weight and weight_scale)"

_CODES = ".weight"


def find(files: CheckpointFiles) -> Iterator[Fp4Weight]:
    """The weights of this layout.

    Raises:
        CheckpointError: parts that are missing, or that do not fit together.
    """
    found = [
        (key, scale, global_scale)
        for key, stored in files.tensors.items()
        for scale, global_scale in _scales(key)
        if stored.dtype == torch.uint8 and scale in files.tensors
    ]
    is_e4m3 = [names for names in found if files.tensors[names[1]].dtype == torch.float8_e4m3fn]
    require(files.tensors, (global_scale for _, _, global_scale in is_e4m3), DESCRIPTION)
    for names in found:
        yield _weight(files, *names)


def _scales(key: str) -> tuple[tuple[str, str], ...]:
    """Where the scale and the global scale of codes would be: beside ``X.weight``, or after the name of a parameter."""
    if key.endswith(_CODES):
        return ((f"{key}_scale", f"{key}_scale_2"),)
    return (f"{key}_weight_scale", f"{key}_weight_scale_2"), (f"{key}.scale", f"{key}.scale2")


def _weight(files: CheckpointFiles, key: str, scale_key: str, global_key: str) -> Fp4Weight:
    has_global = global_key in files.tensors
    stored = files.tensors[scale_key]
    fmt, k_first = oriented_format(f"reading {DESCRIPTION}", stored.dtype, files.tensors[key].shape, stored.shape, key)
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
        global_scale = None
        if has_global:
            global_scale = shaped_global_scale(f"reading {DESCRIPTION}", files.read(global_key), shape, key)
        return packed(*with_k_last(files.read(key), files.read(scale_key), k_first), global_scale, key)

    keys = (key, scale_key, *([global_key] if has_global else []))
    return Fp4Weight(key, DESCRIPTION, fmt, (*shape[:-1], 2 * shape[-1]), keys, read)
