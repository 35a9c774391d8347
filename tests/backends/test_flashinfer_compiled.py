"""Whole models compiled for a GPU that is not here: FlashInfer's weights fold, and its stand-ins are called right."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from flashinfer_stand_in import CUTLASS, FP4_QUANTIZE, TRTLLM_FROM_LOGITS, stand_in
from models import pack_experts, randomize_biases, tiny_model, token_ids
from test_flashinfer_checks import device

from fp4_inductor import LoweringReport, Options
from fp4_inductor.dynamo_backend import compile_with


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "fmt", "arch", "options", "expected"),
    [
        ("gpt_oss", "mxfp4", "sm_90", Options("flashinfer_cutlass"), [CUTLASS]),
        ("gpt_oss", "mxfp4", "sm_100", Options("flashinfer_trtllm"), [TRTLLM_FROM_LOGITS]),
        (
            "qwen3_moe",
            "nvfp4",
            "sm_103",
            Options("flashinfer_trtllm", activation_format="nvfp4"),
            [FP4_QUANTIZE, TRTLLM_FROM_LOGITS],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_compiled_it_is_the_model(
    family: str, fmt: str, arch: str, options: Options, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = stand_in(monkeypatch)
    model = tiny_model(family, layers=1)
    randomize_biases(model)
    pack_experts(model, fmt)
    ids = token_ids()
    reports: list[LoweringReport] = []
    backend = partial(compile_with, options=options, device=device(arch), on_report=reports.append)
    with torch.no_grad():
        wanted = model(ids).logits.double()
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        found = [compiled(ids).logits.double() for _ in range(2)]
    assert calls == 2 * expected
    (site,) = (site for report in reports for site in report.sites)
    assert site.selection.chosen == options.backend
    assert all(weight.prepared for weight in site.weights)
    assert torch.equal(*found)
    error = (found[0] - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float(error.median()) < (0.1 if options.activation_format is None else 0.3)
