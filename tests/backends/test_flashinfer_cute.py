"""FlashInfer's CuTe-DSL backends against a float64 reference, through stand-ins that compute what they are told to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from flashinfer_cute_stand_in import CUTEDSL, stand_in
from flashinfer_stand_in import FP4_QUANTIZE, MXFP8_QUANTIZE
from moe_cases import CLAMPED_SWIGLU, RUNTIME_SWIGLU, SWIGLU, MoECase, make_case
from test_flashinfer import exact_in_nvfp4, with_gate_and_up
from tolerances import assert_close_per_token

from fp4_inductor import DeviceInfo
from fp4_inductor.backends import flashinfer_cute_common
from fp4_inductor.backends.base import KernelBackend
from fp4_inductor.backends.flashinfer_cutedsl import FlashinferCutedslBackend
from fp4_inductor.formats import MXFP4, NVFP4
from fp4_inductor.layouts.exactness import InexactWeightsError
from fp4_inductor.plan import run_plan
from fp4_inductor.spec import RUNTIME, ActivationSpec, GateUpOrder, Operand

LIBRARIES = (("flashinfer-python", "0.7.2.post1"), ("triton", "3.6.0"))
GEGLU_TANH, RELU2 = ActivationSpec("gelu_tanh"), ActivationSpec("relu2", gated=False)
CUTE = FlashinferCutedslBackend()
MODES: dict[str, tuple[KernelBackend, str, Any, str | None, list[str]]] = {
    # backend, device, weights, activations, calls
    "cutedsl-bf16": (CUTE, "sm_100", NVFP4, None, [CUTEDSL]),
    "cutedsl-nvfp4": (CUTE, "sm_103", NVFP4, "nvfp4", [FP4_QUANTIZE, CUTEDSL]),
    "cutedsl-mxfp8": (CUTE, "sm_100", MXFP4, "mxfp8", [MXFP8_QUANTIZE, CUTEDSL]),
}
NVFP4_MODES = [name for name, mode in MODES.items() if mode[2] is NVFP4]
QUANTISED = [name for name in NVFP4_MODES if MODES[name][3] is not None]
every_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    torch.manual_seed(0)
    return stand_in(monkeypatch)


def device(name: str) -> DeviceInfo:
    return replace(DeviceInfo.parse(name), libraries=LIBRARIES)


def case(mode: str, **given: Any) -> MoECase:
    """A block whose activations the mode's format holds exactly."""
    _, _, fmt, activations, _ = MODES[mode]
    made = make_case(fmt, **{"global_scale": "expert", **given})
    hidden = made.operands[Operand.HIDDEN]
    if activations == "mxfp8":
        hidden = hidden.to(torch.float8_e4m3fn).to(hidden.dtype)
    if activations in ("nvfp4", "mxfp4"):
        hidden = exact_in_nvfp4(hidden)
    spec = replace(made.spec, activation_format=activations)
    return MoECase(spec, {**made.operands, Operand.HIDDEN: hidden})


def run(mode: str, made: MoECase) -> torch.Tensor:
    backend, arch, *_ = MODES[mode]
    verdict = backend.check(made.spec, device(arch))
    assert verdict.ok, verdict
    return run_plan(backend.plan(made.spec, device(arch)), made.operands)


def check(mode: str, made: MoECase) -> None:
    assert_close_per_token(run(mode, made), made.reference(), torch.bfloat16)


@every_mode
@pytest.mark.parametrize("order", GateUpOrder, ids=str)
def test_orders_and_padding(mode: str, order: GateUpOrder, calls: list[str]) -> None:
    check(mode, case(mode, w13_order=order, hidden_size=160, intermediate_size=96))
    assert calls == MODES[mode][-1]


@every_mode
@pytest.mark.parametrize("num_experts", [4, 7], ids=str)
@pytest.mark.parametrize("activation", [SWIGLU, CLAMPED_SWIGLU, RUNTIME_SWIGLU, GEGLU_TANH, RELU2], ids=str)
def test_activations(mode: str, activation: ActivationSpec, num_experts: int) -> None:
    """Right, or refused where the page of refusals says so."""
    made = case(mode, activation=activation, num_experts=num_experts, intermediate_size=160, num_tokens=5)
    backend, arch, *_ = MODES[mode]
    if backend.check(made.spec, device(arch)).ok:
        check(mode, made)
    else:
        assert mode == "b12x-bf16", "it alone has none of the knobs"


@every_mode
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32], ids=str)
def test_routing_as_given(mode: str, weights_dtype: torch.dtype, ids_dtype: torch.dtype) -> None:
    check(mode, case(mode, outside_ids=True, weights_dtype=weights_dtype, ids_dtype=ids_dtype, num_tokens=9))


@every_mode
def test_ids_far_outside_are_no_experts(mode: str) -> None:
    """Kernels that read 16 bits of an id would take these for experts 0 and 1."""
    made = case(mode)
    ids = made.operands[Operand.TOPK_IDS].clone()
    ids[:3, 0] = 1 << 16
    ids[3:, 0] = (1 << 32) + 1
    check(mode, MoECase(made.spec, {**made.operands, Operand.TOPK_IDS: ids}))


@every_mode
def test_no_tokens(mode: str, calls: list[str]) -> None:
    made = case(mode)
    first = (Operand.HIDDEN, Operand.TOPK_IDS, Operand.TOPK_WEIGHTS)
    operands = {operand: tensor[:0] if operand in first else tensor for operand, tensor in made.operands.items()}
    out = run(mode, MoECase(made.spec, operands))
    assert (out.shape, out.dtype) == ((0, 128), torch.bfloat16)
    assert not calls


@every_mode
def test_many_tokens_go_in_pieces(mode: str, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    padded = 256 if mode.startswith("cutedsl") else 128
    monkeypatch.setattr(flashinfer_cute_common, "MAX_ELEMENTS", 4 * 2 * padded)
    check(mode, case(mode, num_tokens=9))
    assert calls.count(MODES[mode][-1][-1]) == 3


@pytest.mark.parametrize("mode", NVFP4_MODES)
def test_unequal_globals_of_gate_and_up(mode: str) -> None:
    made = case(mode, w13_order=GateUpOrder.INTERLEAVED)
    factor = made.operands[Operand.W13_GLOBAL]
    check(mode, with_gate_and_up(made, factor, factor * (torch.rand(5, 1) + 0.5)))


@pytest.mark.parametrize("mode", NVFP4_MODES)
@pytest.mark.parametrize("activation", [ActivationSpec("silu", beta=0.7), CLAMPED_SWIGLU], ids=str)
def test_unequal_globals_that_no_scalar_holds_are_refused(mode: str, activation: ActivationSpec) -> None:
    made = case(mode, activation=activation)
    backend, arch, *_ = MODES[mode]
    if backend.check(made.spec, device(arch)).ok:
        factor = made.operands[Operand.W13_GLOBAL]
        with pytest.raises(InexactWeightsError, match="one global scale for gate and up"):
            run(mode, with_gate_and_up(made, factor, factor * 1.7))
        check(mode, made)
    else:
        assert mode == "b12x-bf16", "it has no such knobs"


@pytest.mark.parametrize("mode", NVFP4_MODES)
def test_globals_by_row_are_refused(mode: str) -> None:
    with pytest.raises(InexactWeightsError, match="one global scale an expert"):
        run(mode, case(mode, global_scale="row"))


@pytest.mark.parametrize("mode", NVFP4_MODES)
def test_negative_and_zero_block_scales(mode: str) -> None:
    """The kernels read magnitudes."""
    made = case(mode)
    operands = dict(made.operands)
    for operand in (Operand.W13_SCALE, Operand.W2_SCALE):
        bits = operands[operand].view(torch.uint8).clone()
        bits[:, ::3] |= 0x80
        bits[:, 1::7, ::2] = 0x80
        operands[operand] = bits.view(torch.float8_e4m3fn)
    check(mode, MoECase(made.spec, operands))


@pytest.mark.parametrize("mode", QUANTISED)
@pytest.mark.parametrize("scale", [0.0, 2.0**-20, 2.0**20])
def test_activations_of_any_size(mode: str, scale: float) -> None:
    made = case(mode)
    hidden = made.operands[Operand.HIDDEN] * scale
    check(mode, MoECase(made.spec, {**made.operands, Operand.HIDDEN: hidden}))


@every_mode
def test_layers_alike_share_recipes(mode: str) -> None:
    backend, arch, *_ = MODES[mode]
    first, second = (backend.plan(case(mode).spec, device(arch)).prepared for _ in range(2))
    assert first
    assert all(a is b for a, b in zip(first, second, strict=True))


def test_runtime_knobs_are_read_at_the_call() -> None:
    made = case("cutedsl-bf16", activation=ActivationSpec("silu", limit=RUNTIME), amplitude=3.0)
    for limit in (0.5, 2.0):
        operands = {**made.operands, Operand.LIMIT: torch.tensor(limit, dtype=torch.float64)}
        check("cutedsl-bf16", MoECase(made.spec, operands))
