"""Models whose gate and up have global scales of their own, as NVFP4 checkpoints do, on FlashInfer's kernels: exact."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from models import MoEStack, hidden_states, moe_layers, tiny_model
from test_flashinfer_probe import STAND_INS, with_libraries

from fp4_inductor import LoweringReport, Options, explain
from fp4_inductor.dynamo_backend import compile_with
from fp4_inductor.formats import NVFP4
from fp4_inductor.layouts.gate_up import GATE_UP, INTERLEAVED, join_gate_up, split_gate_up
from fp4_inductor.modules import CarriedWeight, carried_weights, pack_parameter
from fp4_inductor.quant import PackedTensors, quantize
from fp4_inductor.reasons import ReasonCode
from fp4_inductor.spec import GlobalGrain

PATHS = {
    # backend, device, activations
    "trtllm": ("flashinfer_trtllm", "sm_100", "nvfp4"),
    "cutlass": ("flashinfer_cutlass", "sm_120", "nvfp4"),
    "cutedsl": ("flashinfer_cutedsl", "sm_103", None),
    "b12x": ("flashinfer_b12x", "sm_121", None),
}


def with_pairs(family: str) -> MoEStack:
    """Experts packed as a loader does it: each of gate and up by its own largest weight, global scales by row."""
    model = tiny_model(family, layers=1)
    for layer in moe_layers(model):
        experts, transposed = layer.experts, family == "gpt_oss"
        order = GATE_UP if experts.is_concatenated else INTERLEAVED
        joined, down = (getattr(experts, name).detach() for name in ("gate_up_proj", "down_proj"))
        gate, up = split_gate_up(joined.mT if transposed else joined, order)
        halves = [quantize(half.float(), NVFP4) for half in (gate, 3 * up)]
        rows = [half.global_scale.expand(-1, gate.shape[1]) for half in halves]
        parts = [[half.codes for half in halves], [half.scale.view(torch.uint8) for half in halves], rows]
        codes, scale, numbers = (join_gate_up(*pair, order) for pair in parts)
        w13 = PackedTensors(codes, scale.view(torch.float8_e4m3fn), numbers)
        w2 = quantize((down.mT if transposed else down).float(), NVFP4)
        for name, packed in (("gate_up_proj", w13), ("down_proj", w2)):
            pack_parameter(experts, CarriedWeight(name, NVFP4, transposed), packed, torch.bfloat16)
    return MoEStack(model)


@pytest.mark.parametrize(("family", "pairs"), [("qwen3_moe", "halves"), ("gpt_oss", "turns")])
def test_two_numbers_an_expert_are_held(family: str, pairs: str) -> None:
    (layer,) = with_pairs(family).layers
    assert carried_weights(layer.experts)[0].pairs == pairs
    stored = layer.experts.gate_up_proj_global_scale
    assert stored.shape == (layer.experts.num_experts, 2)
    assert bool((stored[:, 0] != stored[:, 1]).all())


def test_every_path_is_willing() -> None:
    stack, inputs = with_pairs("qwen3_moe"), hidden_states()
    for backend, arch, allowed in PATHS.values():
        options = Options(backend, activation_format=allowed)
        (site,) = explain(stack, inputs, device=with_libraries(arch), options=options).sites
        assert site.selection.spec.w13_global is GlobalGrain.HALF
        assert site.selection.chosen == backend


def test_where_a_limit_meets_both_it_is_refused() -> None:
    stack, options = with_pairs("gpt_oss"), Options(activation_format="nvfp4")
    (site,) = explain(stack, hidden_states(), device=with_libraries("sm_100"), options=options).sites
    verdicts = {verdict.backend: verdict for verdict in site.selection.verdicts}
    for backend in ("flashinfer_trtllm", "flashinfer_cutlass"):
        (reason,) = verdicts[backend].reasons
        assert reason.code is ReasonCode.FORMAT
        assert reason.need.startswith("one global scale for gate and up of an expert")
    assert site.selection.chosen == "triton_w4a16"


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_what_is_computed_is_the_model(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, arch, allowed = PATHS[path]
    (stand_ins,) = (module for module, names in STAND_INS.items() if backend in names)
    stand_ins.stand_in(monkeypatch)
    (layer,), inputs = with_pairs("qwen3_moe").layers, hidden_states()
    reports: list[LoweringReport] = []
    options = Options(backend, activation_format=allowed)
    door = partial(compile_with, options=options, device=with_libraries(arch), on_report=reports.append)
    with torch.no_grad():
        wanted = layer(inputs).double()
        found = torch.compile(layer, backend=door, fullgraph=True)(inputs).double()
    (site,) = (site for report in reports for site in report.sites)
    assert site.selection.chosen == backend
    error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float(error.max()) < (1.5e-2 if allowed is None else 0.3)
