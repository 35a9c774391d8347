"""Blocks compiled for a GPU that is not here: weights fold, and scales reach the kernels under their strides."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from flashinfer_cute_stand_in import given_to_b12x, stand_in
from flashinfer_stand_in import FP4_QUANTIZE, MXFP8_QUANTIZE
from models import Block, hidden_states, pack_experts, tiny_model
from test_flashinfer_cute import B12X, CUTEDSL, device

from fp4_inductor import LoweringReport, Options
from fp4_inductor.dynamo_backend import compile_with


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fmt", "arch", "options", "expected"),
    [
        ("nvfp4", "sm_100", Options("flashinfer_cutedsl"), [CUTEDSL]),
        ("nvfp4", "sm_103", Options("flashinfer_cutedsl", activation_format="nvfp4"), [FP4_QUANTIZE, CUTEDSL]),
        ("mxfp4", "sm_100", Options("flashinfer_cutedsl", activation_format="mxfp8"), [MXFP8_QUANTIZE, CUTEDSL]),
        ("nvfp4", "sm_120", Options("flashinfer_b12x"), [B12X]),
        ("mxfp4", "sm_121", Options("flashinfer_b12x", activation_format="mxfp4"), [B12X]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_compiled_it_is_the_block(
    fmt: str, arch: str, options: Options, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = stand_in(monkeypatch)
    torch.manual_seed(0)
    block, hidden = Block(pack_experts(tiny_model("qwen3_moe", layers=1), fmt)), hidden_states()
    reports: list[LoweringReport] = []
    backend = partial(compile_with, options=options, device=device(arch), on_report=reports.append)
    with torch.no_grad():
        wanted = block(hidden).double()
        compiled = torch.compile(block, backend=backend, fullgraph=True)
        found = [compiled(hidden).double() for _ in range(2)]
    assert calls == 2 * expected
    (site,) = (site for report in reports for site in report.sites)
    assert site.selection.chosen == options.backend
    assert all(weight.prepared for weight in site.weights)
    assert torch.equal(*found)
    for first, second in pairwise(given_to_b12x):
        assert all(a() is b() is not None for a, b in zip(first, second, strict=True)), "they would be packed anew"
    assert len(given_to_b12x) == (2 if arch == "sm_120" else 0)
    error = (found[0] - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float(error.median()) < (0.03 if options.activation_format is None else 0.3)
