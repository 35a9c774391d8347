"""Readers of FP4 checkpoint layouts: packed bytes go from the file into a model's carriers, never through bf16."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from .detect import LAYOUTS, find_weights
from .files import SafetensorsFiles
from .model import build_on_meta, check_shapes, fill, finish, model_config
from .placing import place

__all__ = ["LAYOUTS", "load"]


def load(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    experts_implementation: str = "grouped_mm",
    **hf_kwargs: Any,
) -> torch.nn.Module:
    """The transformers model of a local FP4 checkpoint, its FP4 weights still packed.

    The model is in evaluation mode, without gradients, and generates as one from ``from_pretrained`` does. Experts
    and linear layers that are FP4 in the checkpoint dequantise where they are read; scales of activations are not
    used.

    Args:
        path: folder with ``config.json`` and safetensors in a supported layout (``LAYOUTS``).
        device: of the parameters; None takes torch's default device.
        dtype: of everything that is not packed, and of what packed weights dequantise to.
        experts_implementation: how transformers computes experts; "eager" cannot be compiled as one graph.
        hf_kwargs: for ``AutoModelForCausalLM.from_config``, e.g. ``attn_implementation="sdpa"``.

    Raises:
        CheckpointError: a layout that is not supported, or a file that does not fill the model exactly.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(
            "opening a checkpoint",
            needed="a local folder",
            got="no such folder",
            where=str(folder),
            now="download a model of the Hub with huggingface_hub.snapshot_download and load its folder",
        )
    files = SafetensorsFiles(folder)
    weights = find_weights(files)
    where = torch.get_default_device() if device is None else torch.device(device)
    model = build_on_meta(model_config(files, hf_kwargs), dtype, experts_implementation, hf_kwargs)
    placements = place(model, weights)
    packed = check_shapes(model, placements)
    fill(model, placements, packed, where, dtype)
    return finish(model, folder, where)
