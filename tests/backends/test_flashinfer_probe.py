"""FlashInfer's backends, tried as while a graph is compiled: well-known blocks in small, and its own failures."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import flashinfer_cute_stand_in
import flashinfer_stand_in
import pytest
import torch
from test_flashinfer_checks import device

import fp4_inductor.probe as probe_module
from fp4_inductor import DeviceInfo, Options
from fp4_inductor.backends import BACKENDS, get_backend
from fp4_inductor.backends.base import ProbedBackend
from fp4_inductor.backends.flashinfer_weights import Placing
from fp4_inductor.formats import ACTIVATION_FORMATS, MXFP4, NVFP4
from fp4_inductor.layouts.padding import fit_rows
from fp4_inductor.probe import probe
from fp4_inductor.reasons import ReasonCode
from fp4_inductor.select import select
from fp4_inductor.spec import ActivationSpec, GateUpOrder, GlobalGrain, MoESpec, RouterSpec, Scoring

_SIZES = {"hidden_size": 288, "intermediate_size": 160}
_LOW = {"weights_dtype": torch.bfloat16}
SWIGLU = ActivationSpec("silu")
BLOCKS = {
    "gpt-oss": MoESpec(
        32,
        4,
        **_SIZES,
        weight_format=MXFP4,
        activation=ActivationSpec("silu", alpha=1.702, beta=1.0, limit=7.0),
        router=RouterSpec(Scoring.SOFTMAX, topk_before_scoring=True),
        w13_order=GateUpOrder.INTERLEAVED,
        has_w13_bias=True,
        has_w2_bias=True,
        **_LOW,
    ),
    "deepseek-v4": MoESpec(
        256, 6, **_SIZES, weight_format=MXFP4, activation=ActivationSpec("silu", limit=10.0), **_LOW
    ),
    "qwen3": MoESpec(
        128,
        8,
        **_SIZES,
        weight_format=NVFP4,
        activation=SWIGLU,
        router=RouterSpec(Scoring.SOFTMAX, renormalize=True),
        **_LOW,
    ),
    "gate and up apart": MoESpec(64, 4, **_SIZES, weight_format=NVFP4, activation=SWIGLU, w13_global=GlobalGrain.HALF),
    "grouped": MoESpec(
        256,
        8,
        **_SIZES,
        weight_format=NVFP4,
        activation=SWIGLU,
        router=RouterSpec(Scoring.SIGMOID, has_bias=True, num_groups=4, topk_groups=2, renormalize=True),
        **_LOW,
    ),
    "llama4": MoESpec(16, 1, **_SIZES, weight_format=NVFP4, activation=SWIGLU, weight_on_input=True, **_LOW),
    "nemotron": MoESpec(128, 6, **_SIZES, weight_format=NVFP4, activation=ActivationSpec("relu2", gated=False)),
}
HERE = torch.device("cpu")
DEVICES = ("sm_90", "sm_100", "sm_103", "sm_120")
STAND_INS = {
    flashinfer_stand_in: ("flashinfer_trtllm", "flashinfer_cutlass"),
    flashinfer_cute_stand_in: ("flashinfer_cutedsl", "flashinfer_b12x"),
}
PROBED = [b for b in BACKENDS if isinstance(b, ProbedBackend) and b.name.startswith("flashinfer_")]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "_tried", {})


def with_libraries(name: str) -> DeviceInfo:
    return replace(device(name), libraries=(("flashinfer-python", "0.7.2.post1"), ("triton", "3.6.0")))


def test_every_flashinfer_backend_is_tried() -> None:
    names = {backend.name for backend in BACKENDS if backend.name.startswith("flashinfer_")}
    assert {backend.name for backend in PROBED} == names
    assert len(names) == 4


@pytest.mark.parametrize("stand_ins", STAND_INS, ids=lambda stand_ins: stand_ins.__name__)
@pytest.mark.parametrize("name", BLOCKS)
def test_well_known_blocks_in_small(name: str, stand_ins: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is willing gets a small layer right, as far as stand-ins for the kernels tell."""
    stand_ins.stand_in(monkeypatch)
    for allowed in (None, *ACTIVATION_FORMATS):
        spec = replace(BLOCKS[name], activation_format=allowed)
        for arch in DEVICES:
            for backend in map(get_backend, STAND_INS[stand_ins]):
                if backend.check(spec, with_libraries(arch)).ok:
                    assert probe(backend, spec, with_libraries(arch), HERE) is None


@pytest.mark.parametrize("fault", ["rows in the model's order", "rows left shuffled", "scales left as they are"])
@pytest.mark.parametrize("allowed", [None, "mxfp8"])
def test_a_layout_that_a_kernel_reads_otherwise_is_found(
    fault: str, allowed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were a formula of a layout wrong, no block would run with it."""
    flashinfer_stand_in.stand_in(monkeypatch)
    module = "fp4_inductor.backends.flashinfer_trtllm"
    if fault == "rows in the model's order":
        monkeypatch.setattr("fp4_inductor.backends.flashinfer_weights.Placing.w13", _unordered)
    if fault == "rows left shuffled":
        monkeypatch.setattr(f"{module}.shuffle_rows", lambda rows: rows.clone())
    if fault == "scales left as they are":
        monkeypatch.setattr(f"{module}.to_trtllm_scales", lambda scale: scale.clone().view(torch.float8_e4m3fn))
    spec = replace(BLOCKS["gpt-oss"], activation_format=allowed)
    reason = probe(get_backend("flashinfer_trtllm"), spec, with_libraries("sm_100"), HERE)
    assert reason is not None
    assert reason.code is ReasonCode.PROBE_FAILED
    assert reason.need.startswith("a small layer's result within")


def _unordered(placing: Placing, rows: torch.Tensor) -> torch.Tensor:
    return fit_rows(rows, 2 * placing.intermediate_size)


@pytest.mark.parametrize("backend", PROBED, ids=lambda backend: backend.name)
def test_without_the_library_it_is_refused(backend: ProbedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its metadata is there, its modules are not."""
    for module in ("flashinfer", "flashinfer.fused_moe", "flashinfer.tllm_enums", "flashinfer.jit"):
        monkeypatch.setitem(sys.modules, module, None)
    assert _failure_of(backend).startswith(("ModuleNotFoundError: ", "ImportError: "))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", PROBED, ids=lambda backend: backend.name)
def test_the_library_itself_without_a_gpu_is_refused(backend: ProbedBackend) -> None:
    """Whatever FlashInfer raises then is among what is expected of it."""
    flashinfer_stand_in.real("fused_moe.cutlass_fused_moe")
    assert _failure_of(backend)


def _failure_of(backend: ProbedBackend) -> str:
    found = ""
    for allowed in (None, *ACTIVATION_FORMATS):
        for arch in DEVICES:
            for name in ("qwen3", "deepseek-v4"):
                spec = replace(BLOCKS[name], activation_format=allowed)
                if backend.check(spec, with_libraries(arch)).ok:
                    reason = probe(backend, spec, with_libraries(arch), HERE)
                    assert reason is not None
                    assert reason.code is ReasonCode.PROBE_FAILED
                    found = reason.got
    return found


def test_the_next_willing_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("flashinfer", "flashinfer.fused_moe", "flashinfer.tllm_enums"):
        monkeypatch.setitem(sys.modules, module, None)
    on, spec = with_libraries("sm_100"), BLOCKS["gpt-oss"]
    assert select(spec, on, Options()).chosen == "flashinfer_trtllm"
    selection = select(spec, on, Options(), probe=lambda backend, spec: probe(backend, spec, on, HERE))
    assert selection.chosen == "triton_w4a16"
    (verdict,) = (verdict for verdict in selection.verdicts if verdict.backend == "flashinfer_trtllm")
    assert [reason.code for reason in verdict.reasons] == [ReasonCode.PROBE_FAILED]
