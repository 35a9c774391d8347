"""Which tensors of a checkpoint are FP4 weights, decided by names, dtypes and shapes; a model's name says nothing."""

from __future__ import annotations

import re
from functools import partial

from ..errors import CheckpointError
from . import compressed_tensors, deepseek_v4, fp8, gguf, gpt_oss, modelopt, openai_gpt_oss, torchao
from .files import CheckpointFiles
from .parts import some
from .refusals import refuse_by_name, refuse_integers, refuse_left_over, refuse_ue5m3
from .weights import Fp4Weight, PlainWeight, Weight

LAYOUTS = (gpt_oss, openai_gpt_oss, modelopt, compressed_tensors, deepseek_v4, torchao, gguf)

ACTIVATION_SCALES = re.compile(
    r"(\.|_proj_)((input|output|activation|prob_output|q|k|v|kv)_(global_)?scale(_2)?|(input|output|q|k|v)_zero_point)$"
    r"|\.[kv]_proj\.[kv]_bias$|_weight\.(input_amax|original_shape)$"
)
"""Scales of activations and of the cache: weights are FP4 here, what flows through them is not."""


def find_weights(files: CheckpointFiles) -> list[Weight]:
    """Every weight of the checkpoint, FP4 or not, under the name that an unquantised one would give it.

    Raises:
        CheckpointError: no FP4 weight, a tensor that two layouts claim, a weight that lacks a part, or a checkpoint
            that means something else by its FP4 bytes.
    """
    refuse_by_name(files)
    weights: list[Weight] = []
    claimed: dict[str, str] = {}
    for layout in (*LAYOUTS, fp8):
        for weight in layout.find(files):
            for key in weight.keys:
                if claimed.setdefault(key, layout.DESCRIPTION) != layout.DESCRIPTION:
                    _refuse_two_readings(key, claimed[key], layout.DESCRIPTION)
            weights.append(weight)
    if not any(isinstance(weight, Fp4Weight) for weight in weights):
        raise CheckpointError(
            "recognising a checkpoint's layout",
            needed="one of: " + "; ".join(layout.DESCRIPTION for layout in LAYOUTS),
            got=f"{len(files.tensors)} tensors of another layout, such as {some(sorted(files.tensors)[:3])}",
            where=str(files.folder),
            now="weights that are not FP4 load with transformers; then call quantize_",
        )
    refuse_ue5m3(files, weights)
    refuse_integers(files, weights)
    refuse_left_over(files, claimed)
    for key, stored in files.tensors.items():
        if key not in claimed and not ACTIVATION_SCALES.search(key):
            weights.append(PlainWeight(key, stored.shape, stored.dtype, (key,), partial(files.read, key)))
    return weights


def _refuse_two_readings(key: str, first: str, second: str) -> None:
    raise CheckpointError(
        "recognising a checkpoint's layout",
        needed="one reading of every tensor",
        got=f"two: {first}, and {second}",
        where=key,
        now="remove the tensors of one of the two from the checkpoint",
    )
