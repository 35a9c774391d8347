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

from .files import CheckpointFiles
from .parts import require
from .weights import Fp4Weight, scaled_weight

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
        yield scaled_weight(files, names[0], DESCRIPTION, names)


def _scales(key: str) -> tuple[tuple[str, str], ...]:
    """Where the scale and the global scale of codes would be: beside ``X.weight``, or after the name of a parameter."""
    if key.endswith(_CODES):
        return ((f"{key}_scale", f"{key}_scale_2"),)
    return (f"{key}_weight_scale", f"{key}_weight_scale_2"), (f"{key}.scale", f"{key}.scale2")
