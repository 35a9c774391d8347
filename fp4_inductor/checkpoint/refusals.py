"""Checkpoints that hold FP4 bytes and mean something else by them: each refused with its reason and its cure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch

from ..errors import CheckpointError
from ..formats import MXFP4
from .files import CheckpointFiles
from .parts import some, weight_groups
from .weights import Fp4Weight, Weight

_PLAIN = "export it again as plain NVFP4 or MXFP4"
_TENSORS: tuple[tuple[str, str, str], ...] = (
    (
        r"[._]pre_quant_scale$",
        "activations that are scaled by channel before the layer (AWQ)",
        "export it again without AWQ, or with the scales folded into the layers before",
    ),
    (r"svdquant_lora_[ab]$", "a low-rank part beside the FP4 weight (SVDQuant)", _PLAIN),
    (
        r"(forward|backward)_hadamard_matrix$|[._](shared_)?input_rotation(_\d+)?$|[._]spinquant_r\d\w*$",
        "weights in a rotated basis, whose activations must be rotated",
        _PLAIN,
    ),
    (
        r"\.(qweight|qzeros|g_idx|weight_zero_point)$",
        "integers with zero points (GPTQ or AWQ INT4)",
        "load it with transformers, and call quantize_ on the model that it dequantises to",
    ),
    (
        r"\.weight\.(absmax|quant_map|nested_absmax|quant_state\.\w+)$",
        "bitsandbytes' 4-bit codes, which are decoded by a table",
        "load it with transformers, and call quantize_ on the model that it dequantises to",
    ),
    (r"quantized_\w+_(values|scale_factors|amax)$", "fouroversix' own layout of scales", _PLAIN),
    (
        r"weight_quantizer\._(scale|double_scale|amax)$",
        "ModelOpt's own state of a model, not an export of it",
        "restore it with ModelOpt, and write it with export_hf_checkpoint",
    ),
    (
        r"[._](weights|activation|prequant)(_block)?_scaling_factor(_2|_interleaved)?$",
        "a TensorRT-LLM checkpoint, whose weights stand as its engines take them",
        "give the Hugging Face checkpoint that it was made from, or one by export_hf_checkpoint",
    ),
    (
        r"(blockscale|scale)_(swizzled|shuffled|interleaved)$|\.g[12]_alphas$",
        "weights and scales as an inference engine holds them, re-ordered for its kernels",
        "give the checkpoint that the engine loaded",
    ),
)
_ROTATIONS = ("transform_config", "rotation_config", "hadamard_config", "spinquant_config")
_LEFT = re.compile(r"[._](weight_scale|weight_scale_2|weight_scale_inv|weight_global_scale|weight_shape|scale)$")


def refuse_by_name(files: CheckpointFiles) -> None:
    """Refuse what tensors' names and the config give away.

    Raises:
        CheckpointError: with the reason and the cure.
    """
    for pattern, what, cure in _TENSORS:
        if found := sorted(key for key in files.tensors if re.search(pattern, key)):
            _refuse(files, what, found, cure)
    mlx = sorted(
        key
        for key, stored in files.tensors.items()
        if key.endswith(".weight") and stored.dtype == torch.uint32 and f"{key[:-6]}scales" in files.tensors
    )
    if mlx:
        cure = (
            "give the checkpoint that mlx_lm.convert read: MLX packs eight codes in an integer, under names of its own"
        )
        _refuse(files, "weights in MLX's layout", mlx, cure)
    integers = sorted(
        key for key, stored in files.tensors.items() if key.endswith("weight_packed") and stored.dtype != torch.uint8
    )
    if integers:
        _refuse(files, "INT4 codes, packed in int32", integers, "load it with transformers, then call quantize_")
    for name in _ROTATIONS:
        if _says_something(files.quantization.get(name)):
            got = f"{name} {json.dumps(files.quantization[name])[:200]}"
            _refuse(files, f"weights in a rotated basis, whose activations must be rotated: {got}", [], _PLAIN)


def refuse_ue5m3(files: CheckpointFiles, weights: Iterable[Weight]) -> None:
    """Refuse one byte a scale that the config does not call e8m0.

    Raises:
        CheckpointError: names both readings.
    """
    bytes_as_scales = sorted(
        weight.keys[1]
        for weight in weights
        if isinstance(weight, Fp4Weight)
        and weight.format == MXFP4
        and not files.is_gguf  # whose types say what scales are
        and files.tensors[weight.keys[1]].dtype == torch.uint8
    )
    said = list(_format_names(files.quantization))
    said = said if said and all("nv" in name for name in said) else []
    said += [word for word in _words(files.quantization) if "e5m3" in word]
    if bytes_as_scales and said:
        what = f"uint8 scales, which read as e8m0 or as ue5m3 (nvfp4_v2), under a config that says {said[0]!r}"
        cure = "ue5m3 scales have no kernel: export it again as NVFP4 with e4m3 scales, or as MXFP4"
        _refuse(files, what, bytes_as_scales, cure)


def refuse_integers(files: CheckpointFiles, weights: Iterable[Weight]) -> None:
    """Refuse codes that the config calls integers: MXINT4 has the names, the dtypes and the shapes of MXFP4.

    Raises:
        CheckpointError: names both readings.
    """
    codes = sorted(weight.keys[0] for weight in weights if isinstance(weight, Fp4Weight))
    layers = files.quantization.get("extra_config")
    parts = [files.quantization, *(layers.values() if isinstance(layers, dict) else ())]
    names = {part.get("data_type") for part in parts if isinstance(part, dict)}
    integers = {name for name in names if isinstance(name, str) and name.startswith("mx_int")}
    types = {str(group["weights"].get("type")) for group in weight_groups(files.quantization)}
    if types and not types - {"int"}:
        integers |= types
    if codes and integers:
        what = f"codes that read as e2m1 or as integers, under a config that says {min(integers)!r}"
        _refuse(files, what, codes, "integers have no kernel here: export it again as MXFP4 or NVFP4")


def refuse_left_over(files: CheckpointFiles, claimed: Iterable[str]) -> None:
    """Refuse scales that no reader has claimed: part of the checkpoint is quantised in another way.

    Raises:
        CheckpointError: lists them.
    """
    taken = set(claimed)
    left = []
    for key in files.tensors.keys() - taken:
        match = _LEFT.search(key)
        owner = None if match is None else files.tensors.get(f"{key[: match.start()]}.weight")
        owner = owner or (None if match is None else files.tensors.get(f"{key[: match.start()]}.weight_packed"))
        if owner is not None and owner.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            left.append(key)
    if left:
        cure = "export it again with FP4, FP8 or unquantised weights only"
        _refuse(files, "weights in a format that is not understood beside FP4 ones", sorted(left), cure)


def _says_something(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_says_something(entry) for entry in value.values())
    return bool(value)


def _words(value: Any) -> Iterator[str]:
    """Every text in a config, not its keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _words(entry)


def _format_names(quantization: dict[str, Any]) -> Iterable[str]:
    """What the config calls its weight formats, in lower case."""
    for entry in ("data_type", "quant_algo", "format"):
        if isinstance(name := quantization.get(entry), str):
            yield name.lower()
    for group in weight_groups(quantization):
        if isinstance(name := group.get("format"), str):
            yield name.lower()


def _refuse(files: CheckpointFiles, what: str, names: list[str], cure: str) -> NoReturn:
    raise CheckpointError(
        "reading a checkpoint",
        needed="FP4 weights that decode by codes, scales and a global scale alone",
        got=what + (f": {some(names)}" if names else ""),
        where=str(files.folder),
        now=cure,
    )
