"""The gpt-oss layout: ``*_blocks uint8 [E, N, K/32, 16]`` and ``*_scales uint8 [E, N, K/32]``, MXFP4.

Codes are canonical once the last two axes are one, also where the module stores ``[E, K, N]``; rows
keep the module's own gate and up order (interleaved). Source: transformers, integrations/mxfp4.py.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from ..errors import CheckpointError
from ..formats import E8M0_NAN, MXFP4
from ..modules import CarriedWeight, pack_parameter, transposed_experts
from ..quant import PackedTensors
from .files import SafetensorsFiles

DESCRIPTION = "gpt-oss MXFP4 as published for transformers (*_blocks and *_scales)"

_BLOCKS, _SCALES = "_blocks", "_scales"


def claims(keys: Collection[str]) -> bool:
    """Whether the layout is this one."""
    return any(key.endswith(_BLOCKS) and key.removesuffix(_BLOCKS) + _SCALES in keys for key in keys)


def advice(keys: Collection[str]) -> str:
    """What to do about a related layout that is not read, "" if it is unrelated."""
    if any(key.endswith("mlp1_weight.blocks") for key in keys):
        return "this is gpt-oss in OpenAI's own layout: load the top folder of the repository, not original/"
    return ""


def target_name(key: str) -> str:
    """The model's name of a checkpoint tensor."""
    if key.endswith(_BLOCKS):
        return key.removesuffix(_BLOCKS) + "_packed"
    if key.endswith(_SCALES):
        return key.removesuffix(_SCALES) + "_block_scale"
    return key


def convert(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """A checkpoint tensor in canonical form.

    Raises:
        CheckpointError: a scale that is NaN.
    """
    if key.endswith(_BLOCKS):
        return tensor.flatten(-2)
    if key.endswith(_SCALES) and bool((tensor == E8M0_NAN).any()):
        count = int((tensor == E8M0_NAN).sum())
        raise CheckpointError("reading block scales", needed="numbers", got=f"{count} NaN (byte 255)", where=key)
    return tensor


def install_carriers(model: nn.Module, files: SafetensorsFiles, dtype: torch.dtype) -> None:
    """Turn the model's expert weights into empty carriers on the meta device.

    Raises:
        CheckpointError: the model has no such weights, or they have another shape.
    """
    for key in sorted(key for key in files.keys if key.endswith(_BLOCKS)):
        path, _, name = key.removesuffix(_BLOCKS).rpartition(".")
        module = dict(model.named_modules()).get(path)
        parameter = None if module is None else module._parameters.get(name)
        if module is None or parameter is None:
            raise CheckpointError("installing packed weights", needed=f"{path}.{name} in the model", got="none")
        transposed = bool(transposed_experts(module))
        e, n, k = parameter.mT.shape if transposed else parameter.shape
        if files.shapes[key] != (e, n, k // MXFP4.block_size, MXFP4.block_size // 2):
            needed = f"the shape of config.json, {e} experts of {n} x {k}"
            raise CheckpointError("installing packed weights", needed=needed, got=str(files.shapes[key]), where=key)
        codes = torch.empty(e, n, k // 2, dtype=torch.uint8, device="meta")
        scale = torch.empty(e, n, k // MXFP4.block_size, dtype=MXFP4.scale_dtype, device="meta")
        pack_parameter(module, CarriedWeight(name, MXFP4, transposed), PackedTensors(codes, scale, None), dtype)
