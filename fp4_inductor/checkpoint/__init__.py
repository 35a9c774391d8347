"""Readers of FP4 checkpoint layouts: packed bytes go from the file into a model's carriers, never through bf16."""

from __future__ import annotations

import os
from typing import Any

import torch

from ..errors import CheckpointError
from . import gpt_oss
from .files import SafetensorsFiles
from .model import build_on_meta, check_names, fill, finish

LAYOUTS = (gpt_oss,)


def load(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    experts_implementation: str = "grouped_mm",
    **hf_kwargs: Any,
) -> torch.nn.Module:
    """The transformers model of a local FP4 checkpoint, its expert weights still packed.

    The model is in evaluation mode, without gradients, and generates as one from ``from_pretrained`` does.

    Args:
        path: folder with ``config.json`` and safetensors in a supported layout (``LAYOUTS``).
        device: of the parameters; None takes torch's default device.
        dtype: of everything that is not packed, and of what packed weights dequantise to.
        experts_implementation: how transformers computes experts; "eager" cannot be compiled as one graph.
        hf_kwargs: for ``AutoModelForCausalLM.from_config``, e.g. ``attn_implementation="sdpa"``.

    Raises:
        CheckpointError: a layout that is not supported, or a file that does not fill the model exactly.
    """
    files = SafetensorsFiles(path)
    layout = next((layout for layout in LAYOUTS if layout.claims(files.keys)), None)
    if layout is None:
        raise CheckpointError(
            "recognising a checkpoint's layout",
            needed="one of: " + "; ".join(layout.DESCRIPTION for layout in LAYOUTS),
            got=f"{len(files.keys)} tensors of another layout, such as {', '.join(sorted(files.keys)[:3])}",
            where=str(path),
            now=gpt_oss.advice(files.keys) or "weights that are not FP4 load with transformers; then call quantize_",
        )
    where = torch.get_default_device() if device is None else torch.device(device)
    model = build_on_meta(files.folder, dtype, experts_implementation, hf_kwargs)
    layout.install_carriers(model, files, dtype)
    names = {key: layout.target_name(key) for key in files.keys}
    check_names(model, names, files)
    fill(model, names, files, layout.convert, where, dtype)
    return finish(model, files.folder, where)
