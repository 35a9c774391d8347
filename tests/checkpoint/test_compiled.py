"""Loaded models compile: every layout's experts become one kernel call, dense FP4 layers stay in the graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from layout_writers import LINEARS, Checkpoint, write_per_expert, write_stacked
from models import MoEStack
from torchao_writer import write_torchao

import fp4_inductor
from fp4_inductor.checkpoint import load

ONE = {"num_hidden_layers": 1}
STACKED: dict[str, Callable[[Path], Checkpoint]] = {
    "gpt-oss, K first": lambda path: write_stacked(path, "gpt_oss", k_first=True, **ONE),
    "gpt-oss, pairs": lambda path: write_stacked(path, "gpt_oss", k_first=False, scales="pair", **ONE),
    "gpt-oss, one by one": lambda path: write_per_expert(path, "compressed-tensors nvfp4", "gpt_oss", **ONE),
    "qwen, K last": lambda path: write_stacked(path, "qwen3_moe", k_first=False, scales="each", **ONE),
    "torchao nvfp4": lambda path: write_torchao(path, is_e4m3=True, swizzled=True, **ONE),
    "torchao mxfp4": lambda path: write_torchao(path, is_e4m3=False, swizzled=False, **ONE),
}
WRITERS: dict[str, Callable[[Path], Checkpoint]] = {
    **{
        layout: lambda path, layout=layout: write_per_expert(path, layout, **ONE)  # type: ignore[misc]
        for layout in LINEARS
    },
    **STACKED,
}


def hidden(model: Any) -> torch.Tensor:
    return torch.randn(1, 12, model.config.hidden_size).to(torch.bfloat16)


@pytest.mark.parametrize("layout", WRITERS)
def test_the_experts_of_every_layout_are_recognised(layout: str, tmp_path: Path) -> None:
    WRITERS[layout](tmp_path)
    model: Any = load(tmp_path)
    report = fp4_inductor.explain(MoEStack(model), hidden(model), device="cpu")
    assert len(report.sites) == 1, report
    assert report.sites[0].selection.chosen is not None
    assert not report.near_misses


@pytest.mark.parametrize("layout", ["auto-round nvfp4", "gpt-oss, pairs"])
def test_kernels_take_global_scales_that_differ(layout: str, tmp_path: Path) -> None:
    WRITERS[layout](tmp_path)
    model: Any = load(tmp_path)
    options = {"fp4moe.strict": True, "fp4moe.on_unsupported": "error", "fp4moe.verify": "first_call"}
    compiled = torch.compile(MoEStack(model), backend="fp4moe", fullgraph=True, options=options)
    inputs = hidden(model)
    with torch.no_grad():
        actual, expected = compiled(inputs).double(), MoEStack(model)(inputs).double()
    error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.max()) < 1.5e-2
