"""Where a checkpoint is, and where its model goes: the arguments of ``load`` made plain."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from .gguf_header import is_gguf

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_ARGUMENTS = ("revision", "cache_dir", "token", "local_files_only")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def resolve_path(path: str | os.PathLike[str], hf_kwargs: dict[str, Any]) -> Path:
    """The local folder or GGUF file of a checkpoint; a model of the Hub is downloaded, or found where it was before.

    Only files at the top of a repository are taken: safetensors, and the texts beside them.

    Args:
        hf_kwargs: ``revision``, ``cache_dir``, ``token`` and ``local_files_only`` are taken out.

    Raises:
        CheckpointError: neither a folder, nor a GGUF file, nor a model of the Hub.
    """
    hub = {name: hf_kwargs.pop(name) for name in _HUB_ARGUMENTS if name in hf_kwargs}
    folder = Path(path)
    if folder.is_dir() or (folder.is_file() and is_gguf(folder)):
        return folder
    if not _HUB_ID.fullmatch(os.fspath(path)) or folder.exists():
        now = "give the folder that holds config.json and the files of tensors, or a Hub id such as org/model"
        got = "a file" if folder.exists() else "no such folder"
        raise CheckpointError(
            "opening a checkpoint", needed="a folder, or a GGUF file", got=got, where=str(path), now=now
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            "downloading a checkpoint", needed="huggingface_hub", got="none", now='pip install "fp4_inductor[hf]"'
        ) from None
    try:
        allowed = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py"]
        return Path(snapshot_download(os.fspath(path), allow_patterns=allowed, ignore_patterns=["*/*"], **hub))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "opening a checkpoint",
            needed="a local folder, or a model of the Hub",
            got=f"no such folder, and {type(error).__name__}: {str(error).splitlines()[0]}",
            where=str(path),
            now="check the name and the network, or download it elsewhere and give its folder",
        ) from error


def resolve_device(device: torch.device | str | None, device_map: Any) -> torch.device:
    """The one device of the model, from ``device`` or from transformers' ``device_map``.

    Raises:
        CheckpointError: both, or more than one device.
    """
    if device is not None and device_map is not None:
        got = f"device={device!r} and device_map={device_map!r}"
        raise CheckpointError("placing a model", needed="device or device_map", got=got)
    if device_map is None:
        return torch.get_default_device() if device is None else torch.device(device)
    if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    places = set(device_map.values()) if isinstance(device_map, dict) else {device_map}
    if len(places) != 1 or places & {"disk"}:
        raise CheckpointError(
            "placing a model",
            needed="one device for the whole model",
            got=f"device_map over {', '.join(sorted(map(str, places)))}",
            now='give device="cuda", or device_map="auto"',
        )
    return torch.device(places.pop())


def resolve_dtype(
    dtype: torch.dtype | str, torch_dtype: torch.dtype | str | None, config: dict[str, Any]
) -> torch.dtype:
    """The dtype of what is not packed: ``torch_dtype`` is its older name, and "auto" the config's own.

    Raises:
        CheckpointError: none that models run in.
    """
    asked = dtype if torch_dtype is None else torch_dtype
    if asked == "auto":
        text = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
        said = [part.get(name) for part in (config, text or {}) for name in ("dtype", "torch_dtype")]
        asked = next((name for name in said if isinstance(name, str)), "bfloat16")
    found = next((known for known in _DTYPES if asked == known or str(known) == f"torch.{asked}"), None)
    if found is None:
        raise CheckpointError(
            "choosing a dtype", needed="one of " + ", ".join(map(str, _DTYPES)) + ', or "auto"', got=repr(asked)
        )
    return found
