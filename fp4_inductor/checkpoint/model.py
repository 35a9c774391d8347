"""A transformers model built without memory, and filled tensor by tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from .. import experts_interface
from ..errors import CheckpointError
from .files import SafetensorsFiles


def build_on_meta(
    folder: Path, dtype: torch.dtype, experts_implementation: str, hf_kwargs: Mapping[str, Any]
) -> nn.Module:
    """The model that ``config.json`` describes, unquantised and on the meta device.

    Raises:
        CheckpointError: no config, or none that transformers knows.
    """
    if not (folder / "config.json").exists():
        raise CheckpointError("reading a checkpoint's config", needed="config.json", got="none", where=str(folder))
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise CheckpointError(
            "building the model", needed="transformers", got="none", now='pip install "fp4_inductor[hf]"'
        ) from None
    experts_interface.register()
    trust = {key: value for key, value in hf_kwargs.items() if key == "trust_remote_code"}
    try:
        config = AutoConfig.from_pretrained(folder, **trust)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            "reading a checkpoint's config", needed="one that transformers knows", got=str(error), where=str(folder)
        ) from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # transformers must neither unpack nor refuse these weights
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call, no-any-return]
            config, dtype=dtype, experts_implementation=experts_implementation, **hf_kwargs
        )


def check_names(model: Any, names: Mapping[str, str], files: SafetensorsFiles) -> None:
    """Compare the model's names with the checkpoint's before a byte is read; ignored tensors leave ``files``.

    Raises:
        CheckpointError: tensors that the model lacks, or that the checkpoint lacks.
    """
    expected = set(model.state_dict())
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    for key in [key for key, name in names.items() if name not in expected]:
        if any(re.search(pattern, key) for pattern in ignored):
            del files.keys[key]
    unexpected = sorted(key for key in files.keys if names[key] not in expected)
    missing = expected - {names[key] for key in files.keys}
    tied = model.all_tied_weights_keys
    partners = {**tied, **{source: target for target, source in tied.items()}}
    missing -= {name for name in missing if partners.get(name, name) not in missing}
    if unexpected or missing:
        raise CheckpointError(
            "matching the checkpoint with the model",
            needed="the same tensors in both",
            got=f"missing: {_some(sorted(missing))}; unexpected: {_some(unexpected)}",
            where=str(files.folder),
        )


def fill(
    model: nn.Module,
    names: Mapping[str, str],
    files: SafetensorsFiles,
    convert: Callable[[str, torch.Tensor], torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Copy every tensor of the checkpoint to its place on ``device``.

    Raises:
        CheckpointError: a tensor of another shape, or of a dtype that would have to be reinterpreted.
    """
    for key, tensor in tqdm(files.tensors(), total=len(files.keys), desc="Loading", unit="tensor", disable=None):
        path, _, name = names[key].rpartition(".")
        module = model.get_submodule(path)
        target = module._parameters.get(name, module._buffers.get(name))
        assert target is not None
        value = convert(key, tensor)
        same_kind = value.dtype == target.dtype or (value.dtype in _CASTABLE and target.dtype in _CASTABLE)
        if value.shape != target.shape or not same_kind:
            raise CheckpointError(
                "loading a tensor",
                needed=f"{target.dtype} of shape {list(target.shape)}",
                got=f"{value.dtype} of shape {list(value.shape)}",
                where=key,
            )
        wanted = torch.float32 if _kept_in_float32(model, names[key], dtype) else target.dtype
        value = value.to(device, wanted if target.dtype in _CASTABLE else target.dtype, copy=True)
        if name in module._parameters:
            module._parameters[name] = nn.Parameter(value, requires_grad=False)
        else:
            module._buffers[name] = value


def finish(model: Any, folder: Path, device: torch.device) -> nn.Module:
    """Tie weights, compute the buffers that no checkpoint holds, and make the model ready to generate.

    Raises:
        CheckpointError: a tensor that nothing has filled.
    """
    from transformers import GenerationConfig

    missing = {name for name, tensor in model.state_dict().items() if tensor.is_meta}
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    for module in model.modules():
        _compute_buffers(model, module, device)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if empty := [name for name, tensor in tensors if tensor.is_meta]:
        raise CheckpointError("finishing the model", needed="every tensor filled", got=_some(empty) + " empty")
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    finished: nn.Module = model.eval().requires_grad_(False)
    return finished


_CASTABLE = (torch.bfloat16, torch.float16, torch.float32)


def _kept_in_float32(model: Any, name: str, dtype: torch.dtype) -> bool:
    """Whether transformers, too, loads this tensor in float32 in a model of ``dtype``."""
    patterns = list(model._keep_in_fp32_modules_strict or ()) if dtype in (torch.float16, torch.bfloat16) else []
    if dtype == torch.float16:
        patterns += model._keep_in_fp32_modules or ()
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)


def _compute_buffers(model: Any, module: nn.Module, device: torch.device) -> None:
    """Let transformers compute a module's non-persistent buffers; NaN shows where it computed nothing."""
    names = [name for name in module._non_persistent_buffers_set if module.get_buffer(name).is_meta]
    if not names:
        return
    for name in names:
        empty = module.get_buffer(name)
        if not empty.is_floating_point():
            raise CheckpointError("computing buffers", needed="floating-point ones", got=f"{name}: {empty.dtype}")
        module._buffers[name] = torch.full_like(empty, float("nan"), device=device)
    model._init_weights(module)
    if left := [name for name in names if module.get_buffer(name).isnan().any()]:
        got = f"{_some(left)} of {type(module).__name__} left empty"
        raise CheckpointError("computing buffers", needed="transformers to initialise them", got=got)


def _some(names: list[str]) -> str:
    if not names:
        return "none"
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
