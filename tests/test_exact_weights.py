"""Weights that a backend's form cannot hold refuse it where they are at hand: the next one runs, the report says so."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from models import hidden_states, moe_layers, pack_experts, tiny_model
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import fp4_inductor.select as select_module
from fp4_inductor import DeviceInfo, LoweringReport, NoBackendError, Options, explain
from fp4_inductor.backends import get_backend
from fp4_inductor.backends.flashinfer_b12x import FlashinferB12xBackend
from fp4_inductor.backends.ops import define_experts_op, experts_args
from fp4_inductor.backends.reference import _moe as reference_moe
from fp4_inductor.dynamo_backend import compile_with
from fp4_inductor.layouts.exactness import InexactWeightsError, require_exact
from fp4_inductor.plan import KernelPlan, Prepared
from fp4_inductor.reasons import ReasonCode, Verdict
from fp4_inductor.spec import MoESpec, Operand

OP = define_experts_op("moe_exact_weights_test", reference_moe)
NEED = "codes without 0x99 in their first column"


def _without(codes: torch.Tensor) -> torch.Tensor:
    return require_exact(codes, codes[:, :, 0] != 0x99, NEED)


@dataclass(frozen=True)
class Picky:
    """The reference, but for weights with a certain byte."""

    name: str = "picky"

    def check(self, spec: MoESpec, device: DeviceInfo) -> Verdict:
        return Verdict(self.name)

    def rank(self, spec: MoESpec, device: DeviceInfo) -> int:
        return 200

    def plan(self, spec: MoESpec, device: DeviceInfo) -> KernelPlan:
        return KernelPlan(OP, experts_args(spec, w13=Prepared("w13_picky", _without, (Operand.W13,))))


@pytest.fixture(autouse=True)
def _backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select_module, "BACKENDS", (get_backend("cpu_aten"), Picky(), get_backend("reference")))


def layers(count: int, bad: tuple[int, ...]) -> nn.Sequential:
    """Blocks of experts; those at ``bad`` hold the byte that ``Picky`` cannot."""
    model = pack_experts(tiny_model("qwen3_moe", layers=count), "mxfp4")
    for index, layer in enumerate(found := moe_layers(model)):
        codes = layer.experts.gate_up_proj_packed
        codes.view(torch.uint8)[:, :, 0] = 0x12
        if index in bad:
            codes[2, 5, 0] = 0x99
    return nn.Sequential(*found)


def door(reports: list[LoweringReport], backend: str | None = None) -> Callable[..., object]:
    return partial(compile_with, options=Options(backend), on_report=reports.append)


def chosen(reports: list[LoweringReport]) -> list[str | None]:
    return [site.selection.chosen for report in reports for site in report.sites]


def test_each_layer_has_a_backend_that_holds_its_weights() -> None:
    model, reports = layers(2, bad=(1,)), list[LoweringReport]()
    with torch.no_grad():
        wanted = model(hidden_states())
        found = torch.compile(model, backend=door(reports), fullgraph=True)(hidden_states())
    assert chosen(reports) == ["picky", "cpu_aten"]
    error = (found.double() - wanted.double()).norm(dim=-1) / wanted.double().norm(dim=-1)
    assert float(error.max()) < 1.5e-2
    verdicts = {verdict.backend: verdict for verdict in reports[0].sites[1].selection.verdicts}
    (reason,) = verdicts["picky"].reasons
    assert reason.code is ReasonCode.FORMAT
    assert (reason.need, reason.got) == (NEED, "other values in expert 2 of 8")
    assert all(verdict.ok for verdict in reports[0].sites[0].selection.verdicts)


def test_explaining_tells_it_too() -> None:
    model = layers(1, bad=(0,))
    (site,) = explain(model, hidden_states()).sites
    assert site.selection.chosen == "cpu_aten"
    (site,) = explain(model.to("meta"), hidden_states().to("meta"), device="cpu").sites
    assert site.selection.chosen == "picky", "what no weight says"


def test_named_it_is_an_error() -> None:
    with pytest.raises(BackendCompilerFailed, match=f"picky: FORMAT: needs {NEED}") as caught, torch.no_grad():
        torch.compile(layers(1, bad=(0,)), backend=door([], "picky"))(hidden_states())
    assert isinstance(caught.value.inner_exception, NoBackendError)


def test_weights_that_come_later_are_not_taken_wrongly() -> None:
    model, reports = layers(1, bad=()), list[LoweringReport]()
    compiled = torch.compile(model, backend=door(reports))
    with torch.no_grad():
        compiled(hidden_states())
        model[0].experts.gate_up_proj_packed[0, 0, 0] = 0x99
        with pytest.raises(InexactWeightsError, match="another backend"):
            compiled(hidden_states())
        torch._dynamo.reset()
        torch.compile(model, backend=door(reports))(hidden_states())
    assert chosen(reports) == ["picky", "cpu_aten"]


def test_a_dead_model_leaves_nothing() -> None:
    model = layers(1, bad=(0,))
    with torch.no_grad():
        compiled = torch.compile(model, backend=door([]))
        compiled(hidden_states())
    codes = weakref.ref(model[0].experts.gate_up_proj_packed)
    del model, compiled
    torch._dynamo.reset()
    gc.collect()
    assert codes() is None


def test_b12x_is_refused_for_block_scales_that_its_packing_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is installed here: what it would pack is known without it."""
    monkeypatch.setattr(select_module, "BACKENDS", (get_backend("triton_w4a16"), get_backend("flashinfer_b12x")))
    monkeypatch.setattr(FlashinferB12xBackend, "rank", lambda self, spec, device: 1000)
    libraries = (("flashinfer-python", "0.7.2.post1"), ("triton", "3.6.0"))
    device = replace(DeviceInfo.parse("sm_120"), libraries=libraries)
    model = pack_experts(tiny_model("qwen3_moe", layers=1), "nvfp4")
    (layer,) = moe_layers(model)
    (site,) = explain(layer, hidden_states(), device=device).sites
    assert site.selection.chosen == "flashinfer_b12x"
    scale = layer.experts.gate_up_proj_block_scale.view(torch.uint8)
    scale[0, 0, 0], scale[0, 0, 1] = 0x7E, 0x01
    layer.experts.gate_up_proj_packed[0, 0, :16] = 0x77
    (site,) = explain(layer, hidden_states(), device=device).sites
    assert site.selection.chosen == "triton_w4a16"
    assert "within 2**-14 of the largest" in str(site.selection.verdicts[1])
