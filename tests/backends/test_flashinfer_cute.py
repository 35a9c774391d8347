"""FlashInfer's CuTe-DSL backends against a float64 reference, through stand-ins that compute what they are told to."""

from __future__ import annotations

import sys
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from flashinfer_cute_stand_in import B12X, CUTEDSL, b12x_fused_moe, stand_in
from flashinfer_stand_in import FP4_QUANTIZE, MXFP8_QUANTIZE
from moe_cases import (
    CLAMPED_SWIGLU,
    RUNTIME_SWIGLU,
    SWIGLU,
    MoECase,
    make_case,
    with_experts_named_again,
    with_ids_far_outside,
    with_odd_block_scales,
)
from test_flashinfer import exact_in_nvfp4, with_gate_and_up
from tolerances import assert_close_per_token

from fp4_inductor import DeviceInfo
from fp4_inductor.backends import flashinfer_cute_common
from fp4_inductor.backends.base import KernelBackend
from fp4_inductor.backends.flashinfer_b12x import FlashinferB12xBackend
from fp4_inductor.backends.flashinfer_cutedsl import FlashinferCutedslBackend
from fp4_inductor.formats import MXFP4, NVFP4
from fp4_inductor.layouts.exactness import InexactWeightsError
from fp4_inductor.plan import prepare, run_plan
from fp4_inductor.spec import RUNTIME, ActivationSpec, GateUpOrder, GlobalGrain, Operand

LIBRARIES = (("flashinfer-python", "0.7.2.post1"), ("triton", "3.6.0"))
GEGLU_TANH, RELU2 = ActivationSpec("gelu_tanh"), ActivationSpec("relu2", gated=False)
CUTE, SM120 = FlashinferCutedslBackend(), FlashinferB12xBackend()
MODES: dict[str, tuple[KernelBackend, str, Any, str | None, list[str]]] = {
    # backend, device, weights, activations, calls
    "cutedsl-bf16": (CUTE, "sm_100", NVFP4, None, [CUTEDSL]),
    "cutedsl-nvfp4": (CUTE, "sm_103", NVFP4, "nvfp4", [FP4_QUANTIZE, CUTEDSL]),
    "cutedsl-mxfp8": (CUTE, "sm_100", MXFP4, "mxfp8", [MXFP8_QUANTIZE, CUTEDSL]),
    "b12x-bf16": (SM120, "sm_120", NVFP4, None, [B12X]),
    "b12x-nvfp4": (SM120, "sm_121", NVFP4, "nvfp4", [B12X]),
    "b12x-mxfp4": (SM120, "sm_120", MXFP4, "mxfp4", [B12X]),
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
    check(mode, with_ids_far_outside(case(mode)))


@every_mode
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_expert_that_a_token_names_again(mode: str, weights_dtype: torch.dtype) -> None:
    """Kernels have one place for a token and an expert."""
    check(mode, with_experts_named_again(case(mode, top_k=4, weights_dtype=weights_dtype, outside_ids=True)))


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


@pytest.mark.parametrize("mode", ["cutedsl-bf16", "b12x-nvfp4"])
@pytest.mark.parametrize("activation", [ActivationSpec("silu", beta=0.7), CLAMPED_SWIGLU], ids=str)
def test_unequal_globals_that_no_scalar_holds_are_refused(mode: str, activation: ActivationSpec) -> None:
    """Before a weight is seen; were it told otherwise, when it sees them."""
    made = case(mode, activation=activation)
    check(mode, made)
    factor = made.operands[Operand.W13_GLOBAL]
    apart = with_gate_and_up(made, factor, factor * 1.7)
    backend, arch, *_ = MODES[mode]
    (reason,) = backend.check(apart.spec, device(arch)).reasons
    assert reason.need == f"one global scale for gate and up of an expert, for {activation}"
    with pytest.raises(InexactWeightsError, match="one global scale for gate and up"):
        run(mode, MoECase(made.spec, apart.operands))


@pytest.mark.parametrize("mode", NVFP4_MODES)
@pytest.mark.parametrize("zero", ["all", "gate", "up", "w2"])
def test_globals_of_zero(mode: str, zero: str) -> None:
    """Those of an expert whose weights are all zero."""
    made = case(mode, idle_expert=False)
    used = int(made.operands[Operand.TOPK_IDS][0, 0])
    gate, up, w2 = (made.operands[Operand(name)].clone() for name in ("w13_global", "w13_global", "w2_global"))
    for name, factor in (("gate", gate), ("up", up), ("w2", w2)):
        factor[used] = 0.0 if zero in ("all", name) else factor[used]
    made = with_gate_and_up(MoECase(made.spec, {**made.operands, Operand.W2_GLOBAL: w2}), gate, up)
    if (mode, zero) == ("b12x-bf16", "gate"):
        with pytest.raises(InexactWeightsError, match="global scales below 256"):
            run(mode, made)
    else:
        check(mode, made)


@pytest.mark.parametrize("mode", NVFP4_MODES)
def test_globals_by_row_are_refused(mode: str) -> None:
    made = case(mode, global_scale="row")
    backend, arch, *_ = MODES[mode]
    reasons = backend.check(made.spec, device(arch)).reasons
    assert [reason.need for reason in reasons] == [f"one global scale an expert in {name}" for name in ("w13", "w2")]
    told_otherwise = replace(made.spec, w13_global=GlobalGrain.EXPERT, w2_global=GlobalGrain.EXPERT)
    with pytest.raises(InexactWeightsError, match="one global scale an expert"):
        run(mode, MoECase(told_otherwise, made.operands))


@pytest.mark.parametrize("mode", NVFP4_MODES)
def test_negative_and_zero_block_scales(mode: str) -> None:
    """The kernels read magnitudes."""
    check(mode, with_odd_block_scales(case(mode)))


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


@pytest.mark.parametrize("mode", ["b12x-bf16", "b12x-nvfp4", "b12x-mxfp4"])
def test_what_b12x_remembers_by_object(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it packs lives as long as the weights it is given; what it only notes must not outlive the call."""
    backend, arch, *_ = MODES[mode]
    made = case(mode)
    plan = backend.plan(made.spec, device(arch))
    ready = prepare(plan, made.operands)
    given: list[weakref.ref[torch.Tensor]] = []

    def note(**arguments: Any) -> torch.Tensor:
        given.extend(weakref.ref(value) for name, value in arguments.items() if name.startswith(("w1_", "w2_")))
        return b12x_fused_moe(**arguments)

    monkeypatch.setattr(sys.modules["flashinfer.fused_moe"], "b12x_fused_moe", note)
    for _ in range(2):
        run_plan(plan, made.operands, ready)
    kept = {id(tensor) for tensor in (ref() for ref in given) if tensor is not None}
    assert len(given) == 12
    assert kept == ({id(tensor) for tensor in ready.values()} if mode == "b12x-bf16" else set())


@pytest.mark.parametrize("operand", [Operand.W13_SCALE, Operand.W2_SCALE], ids=str)
def test_scales_that_b12x_would_lose_are_refused(operand: Operand) -> None:
    made = case("b12x-bf16", intermediate_size=128)
    bits = made.operands[operand].view(torch.uint8).clone()
    bits[0, 0, 0], bits[0, 1, 1] = 0x7E, 0x07
    operands = {**made.operands, operand: bits.view(torch.float8_e4m3fn)}
    with pytest.raises(InexactWeightsError, match="within 2\\*\\*-14 of the largest"):
        run("b12x-bf16", MoECase(made.spec, operands))
    codes = made.operands[Operand(str(operand).removesuffix("_scale"))].clone()
    codes[0, 1, 8:16] = 0x80
    check("b12x-bf16", MoECase(made.spec, {**operands, Operand(str(operand).removesuffix("_scale")): codes}))


@pytest.mark.parametrize("operand", [Operand.W13_GLOBAL, Operand.W2_GLOBAL], ids=str)
def test_globals_that_b12x_would_make_infinite_are_refused(operand: Operand) -> None:
    made = case("b12x-bf16")
    operands = {**made.operands, operand: made.operands[operand] + 300}
    with pytest.raises(InexactWeightsError, match="global scales below 256"):
        run("b12x-bf16", MoECase(made.spec, operands))


def test_runtime_knobs_are_read_at_the_call() -> None:
    made = case("cutedsl-bf16", activation=ActivationSpec("silu", limit=RUNTIME), amplitude=3.0)
    for limit in (0.5, 2.0):
        operands = {**made.operands, Operand.LIMIT: torch.tensor(limit, dtype=torch.float64)}
        check("cutedsl-bf16", MoECase(made.spec, operands))
