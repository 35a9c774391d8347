"""What the readers of layouts share: the parts of a weight, found by their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import CheckpointError
from .headers import StoredTensor


def require(tensors: Mapping[str, StoredTensor], needed: Iterable[str], layout: str) -> None:
    """Refuse a checkpoint in which weights of ``layout`` lack parts.

    Raises:
        CheckpointError: lists what is missing.
    """
    missing = sorted(set(needed) - tensors.keys())
    if missing:
        raise CheckpointError(
            f"reading {layout}",
            needed="every part of every weight",
            got=f"missing: {some(missing)}",
            now="download the checkpoint again, or export it again",
        )


def weight_groups(quantization: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups of layers in a config that say how weights are quantised, under "weights"."""
    groups = quantization.get("config_groups")
    found = groups.values() if isinstance(groups, dict) else ()
    return [group for group in found if isinstance(group, dict) and isinstance(group.get("weights"), dict)]


def some(names: list[str]) -> str:
    """The first of ``names``, and how many more there are; "none" of none."""
    if not names:
        return "none"
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
