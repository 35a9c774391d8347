"""Readers of FP4 checkpoint layouts: packed bytes go from the file into a model's carriers, never through bf16."""

from __future__ import annotations

import os
from typing import Any

import torch

from .detect import LAYOUTS, find_weights
from .files import CheckpointFiles
from .model import build_on_meta, check_shapes, fill, finish, model_config
from .placing import place
from .saving import saves_packed
from .source import resolve_device, resolve_dtype, resolve_path

__all__ = ["LAYOUTS", "load"]


def load(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str = torch.bfloat16,
    experts_implementation: str = "grouped_mm",
    **hf_kwargs: Any,
) -> torch.nn.Module:
    """The transformers model of an FP4 checkpoint, its FP4 weights still packed.

    The model is in evaluation mode, without gradients, and generates as one from ``from_pretrained`` does. Experts
    and linear layers that are FP4 in the checkpoint dequantise where they are read; scales of activations are not
    used.

    Args:
        path: folder with ``config.json`` and safetensors in a supported layout (``LAYOUTS``), a GGUF file with
            ``config.json`` beside it, or its folder, or a Hub id.
        device: of the parameters; None takes torch's default device.
        dtype: of everything that is not packed, and of what packed weights dequantise to; "auto" as the config says.
        experts_implementation: how transformers computes experts; "eager" cannot be compiled as one graph.
        hf_kwargs: what ``from_pretrained`` knows: ``device_map`` onto one device, ``torch_dtype``, ``revision``,
            ``cache_dir``, ``token``, ``local_files_only``; the rest goes to ``AutoModelForCausalLM.from_config``, e.g.
            ``attn_implementation="sdpa"``.

    Raises:
        CheckpointError: a layout that is not supported, or a file that does not fill the model exactly.
    """
    where = resolve_device(device, hf_kwargs.pop("device_map", None))
    files = CheckpointFiles(resolve_path(path, hf_kwargs))
    dtype = resolve_dtype(dtype, hf_kwargs.pop("torch_dtype", None), files.config)
    weights = find_weights(files)
    model = build_on_meta(model_config(files, hf_kwargs), dtype, experts_implementation, hf_kwargs)
    placements = place(model, weights)
    packed = check_shapes(model, placements)
    fill(model, placements, packed, where, dtype)
    return saves_packed(finish(model, files.folder, where))
