"""Blocks compiled for a GPU that is not here: FlashInfer's weights fold, and its stand-ins are called right."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from flashinfer_stand_in import CUTLASS, FP4_QUANTIZE, TRTLLM_FROM_LOGITS, stand_in
from models import Block, hidden_states, pack_experts, randomize_biases, tiny_model
from moe_cases import make_case
from test_flashinfer_checks import device
from test_lowering_pass import captured_stack, random_inputs

from fp4_inductor import LoweringReport, Options, VerificationError
from fp4_inductor.dynamo_backend import compile_with
from fp4_inductor.formats import ACTIVATION_FORMATS, MXFP4
from fp4_inductor.lowering_pass import lower
from fp4_inductor.verify import tolerances


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
def test_compiled_it_is_the_block(
    family: str, fmt: str, arch: str, options: Options, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = stand_in(monkeypatch)
    model = tiny_model(family, layers=1)
    randomize_biases(model)
    block, hidden = Block(pack_experts(model, fmt)), hidden_states()
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
    error = (found[0] - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float(error.median()) < (0.03 if options.activation_format is None else 0.3)


@pytest.mark.parametrize("limits", [None, (2.4e-2, 6e-2)], ids=["their own", "of bfloat16"])
def test_verification_knows_what_rounded_activations_lose(
    limits: tuple[float, float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    if limits is not None:
        monkeypatch.setattr("fp4_inductor.verify._ROUNDED", {"nvfp4": limits})
    gm = captured_stack("qwen3_moe", "nvfp4")
    options = Options("flashinfer_trtllm", activation_format="nvfp4", verify="first_call")
    verification = lower(gm.graph, options, device("sm_103")).verification
    assert verification is not None
    with nullcontext() if limits is None else pytest.raises(VerificationError, match="flashinfer_trtllm"):
        verification(random_inputs(gm))


@pytest.mark.parametrize("allowed", ACTIVATION_FORMATS)
def test_every_format_of_activations_has_bounds(allowed: str) -> None:
    """Wider than those of the graph's own dtype, and narrower than what is not right at all."""
    spec = make_case(MXFP4).spec
    own, rounded = tolerances(spec, None), tolerances(spec, allowed)
    assert own < rounded < (0.5, 1.0)
    assert own[1] < rounded[1] < 1.0
