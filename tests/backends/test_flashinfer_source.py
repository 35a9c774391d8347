"""FlashInfer's backends beside FlashInfer itself, where it is installed: names, devices, and its own references."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import flashinfer_stand_in
import pytest
import torch
from flashinfer_stand_in import TRTLLM, real
from moe_cases import MoECase, make_case
from test_flashinfer import STEP, device, exact_in_nvfp4
from tolerances import assert_close_per_token

from fp4_inductor.backends import flashinfer_cutlass, flashinfer_trtllm, get_backend
from fp4_inductor.backends.flashinfer_common import Mode
from fp4_inductor.formats import NVFP4
from fp4_inductor.plan import run_plan
from fp4_inductor.spec import GateUpOrder, Operand

ARCHITECTURES = (80, 86, 89, 90, 100, 103, 120, 121)


@pytest.mark.parametrize("name", ["ActivationType", "RoutingMethodType", "SfLayout"])
def test_names_are_theirs(name: str) -> None:
    theirs = real(f"tllm_enums.{name}")
    assert all(theirs[ours.name].value == ours.value for ours in getattr(flashinfer_stand_in, name))


@pytest.mark.parametrize(
    ("modes", "activations", "config"),
    [
        (flashinfer_cutlass.MODES, None, "CutlassW4A16Config"),
        (flashinfer_cutlass.MODES, "mxfp8", "CutlassMxfp8Mxfp4Config"),
        (flashinfer_cutlass.MODES, "nvfp4", "CutlassNvfp4Config"),
        (flashinfer_trtllm.MODES, "mxfp8", "TrtllmFp4Config"),
        (flashinfer_trtllm.MODES, "nvfp4", "TrtllmFp4Config"),
    ],
)
def test_devices_are_theirs(modes: Any, activations: str | None, config: str) -> None:
    """Those of them that are known here."""
    supported = real(f"fused_moe.{config}").supported
    mode = next(mode for mode in modes if mode.activations == activations)
    assert {arch for arch in ARCHITECTURES if supported(arch)} == mode.architectures


@pytest.mark.parametrize("mode", flashinfer_trtllm.MODES, ids=str)
def test_devices_and_activations_are_their_runners(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their table of devices is for all formats at once; what lacks one is told by the runner for it."""
    api, runners = real("fused_moe.api"), real("fused_moe.runners")
    formats = api.QuantFormat[mode.weights.name.upper()], api.QuantFormat[mode.name.upper()]
    config = api.MoEConfig(api.RoutingConfig(64, 8), api.QuantConfig(*formats), api.ExpertConfig(1024))
    runner = object.__new__(runners.TrtllmFp4RoutedRunner)
    runner.config, runner.device = config, torch.device("cuda")
    found = set()
    for arch in ARCHITECTURES:
        monkeypatch.setattr("flashinfer.utils.get_compute_capability", lambda device, arch=arch: divmod(arch, 10))
        with contextlib.suppress(NotImplementedError):
            runner._check_support()
            found.add(arch)
    assert found == mode.architectures
    theirs = {activation.type.name for activation in runner.supported_activation_classes_by_quant[formats]}
    assert mode.functions == theirs - {"Geglu", "Situ"}, "which GELU it is, nothing says; no graph has SiTU"


@pytest.mark.parametrize("mode", flashinfer_cutlass.MODES, ids=str)
def test_activations_are_those_of_cutlass_runners(mode: Mode) -> None:
    names = {"bf16": "CutlassW4A16Runner", "mxfp8": "CutlassMxfp8Mxfp4Runner", "nvfp4": "CutlassNvfp4Runner"}
    theirs = real(f"fused_moe.runners.{names[mode.name]}").supported_activation_classes
    assert mode.functions == {activation.type.name for activation in theirs} - {"Situ", "Identity"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("order", GateUpOrder, ids=str)
def test_trtllm_through_their_reference(order: GateUpOrder, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op calls flashinfer's reference, which un-shuffles and un-tiles what was prepared by itself."""
    reference = real("trace.templates.moe._trtllm_fp4_block_scale_routed_moe_reference")
    monkeypatch.setattr(f"flashinfer.{TRTLLM}", lambda **given: [reference(**given)])
    monkeypatch.setattr("flashinfer.fp4_quantize", flashinfer_stand_in.fp4_quantize)
    given = {"hidden_size": 160, "intermediate_size": 96, "global_scale": "expert", "bias": bias, "w13_order": order}
    made = make_case(NVFP4, activation=STEP, **given)  # type: ignore[arg-type]
    hidden = exact_in_nvfp4(made.operands[Operand.HIDDEN])
    made = MoECase(replace(made.spec, activation_format="nvfp4"), {**made.operands, Operand.HIDDEN: hidden})
    backend, blackwell = get_backend("flashinfer_trtllm"), device("sm_100")
    assert backend.check(made.spec, blackwell).ok
    out = run_plan(backend.plan(made.spec, blackwell), made.operands)
    assert_close_per_token(out, made.reference(), torch.bfloat16)
