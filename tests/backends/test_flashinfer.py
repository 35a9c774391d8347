"""FlashInfer's backends against a float64 reference, through stand-ins that compute what its kernels are told to."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from flashinfer_stand_in import CUTLASS, FP4_QUANTIZE, MXFP8_QUANTIZE, TRTLLM, stand_in
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
from tolerances import assert_close_per_token

from fp4_inductor import DeviceInfo
from fp4_inductor.backends import flashinfer_trtllm, get_backend
from fp4_inductor.backends.flashinfer_common import announce_build
from fp4_inductor.backends.flashinfer_weights import PRODUCT_FACTOR
from fp4_inductor.formats import MXFP4, NVFP4
from fp4_inductor.layouts.exactness import InexactWeightsError
from fp4_inductor.layouts.gate_up import join_gate_up, row_order
from fp4_inductor.plan import run_plan
from fp4_inductor.quant import dequantize
from fp4_inductor.quant.nvfp4 import quantize_nvfp4
from fp4_inductor.reasons import ReasonCode
from fp4_inductor.spec import RUNTIME, ActivationSpec, GateUpOrder, GlobalGrain, Operand

LIBRARIES = (("flashinfer-python", "0.7.2.post1"),)
STEP = ActivationSpec("silu", limit=0.4, bound="clamp_activated")
RELU2 = ActivationSpec("relu2", gated=False)
MODES = {
    # backend, device, weights, activations
    "cutlass-bf16": ("flashinfer_cutlass", "sm_90", MXFP4, None),
    "cutlass-mxfp8": ("flashinfer_cutlass", "sm_120", MXFP4, "mxfp8"),
    "cutlass-nvfp4": ("flashinfer_cutlass", "sm_100", NVFP4, "nvfp4"),
    "trtllm-bf16": ("flashinfer_trtllm", "sm_100", MXFP4, None),
    "trtllm-mxfp8": ("flashinfer_trtllm", "sm_103", MXFP4, "mxfp8"),
    "trtllm-nvfp4": ("flashinfer_trtllm", "sm_103", NVFP4, "nvfp4"),
}
NVFP4_MODES = [mode for mode in MODES if mode.endswith("nvfp4")]
every_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    torch.manual_seed(0)
    return stand_in(monkeypatch)


def device(name: str) -> DeviceInfo:
    return replace(DeviceInfo.parse(name), libraries=LIBRARIES)


def case(mode: str, **given: Any) -> MoECase:
    """A block whose activations the mode's format holds exactly."""
    _, _, fmt, activations = MODES[mode]
    made = make_case(fmt, **{"global_scale": "expert", **given})
    hidden = made.operands[Operand.HIDDEN]
    if activations == "mxfp8":
        hidden = hidden.to(torch.float8_e4m3fn).to(hidden.dtype)
    if activations == "nvfp4":
        hidden = exact_in_nvfp4(hidden)
    spec = replace(made.spec, activation_format=activations)
    return MoECase(spec, {**made.operands, Operand.HIDDEN: hidden})


def exact_in_nvfp4(hidden: torch.Tensor) -> torch.Tensor:
    """Codes of up to 6 in every block times e4m3 scales, the largest of all 448, times a power of two."""
    blocks = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[torch.randint(0, 8, (*hidden.shape, 1))]
    blocks = (blocks.squeeze(-1) * torch.where(torch.rand(hidden.shape) < 0.5, -1, 1)).unflatten(1, (-1, 16))
    blocks[:, :, 0] = 6.0
    scales = (torch.rand(blocks.shape[:2]) * 400 + 40).to(torch.float8_e4m3fn).float()
    scales[:1, :1] = 448.0
    return (blocks * scales.unsqueeze(-1)).flatten(1).mul(2.0**-10).to(hidden.dtype)


def run(mode: str, made: MoECase) -> torch.Tensor:
    name, arch, *_ = MODES[mode]
    backend = get_backend(name)
    verdict = backend.check(made.spec, device(arch))
    assert verdict.ok, verdict
    return run_plan(backend.plan(made.spec, device(arch)), made.operands)


def check(mode: str, made: MoECase) -> None:
    assert_close_per_token(run(mode, made), made.reference(), torch.bfloat16)


@every_mode
@pytest.mark.parametrize("order", GateUpOrder, ids=str)
def test_orders_and_padding(mode: str, order: GateUpOrder, calls: list[str]) -> None:
    check(mode, case(mode, w13_order=order, hidden_size=160, intermediate_size=96))
    library, activations = mode.split("-")
    entry = CUTLASS if library == "cutlass" else TRTLLM
    quantiser = {"mxfp8": [MXFP8_QUANTIZE], "nvfp4": [FP4_QUANTIZE] if library == "trtllm" else []}
    assert calls == [*quantiser.get(activations, []), entry]


@every_mode
@pytest.mark.parametrize("activation", [SWIGLU, CLAMPED_SWIGLU, RUNTIME_SWIGLU], ids=str)
def test_biases_and_knobs(mode: str, activation: ActivationSpec) -> None:
    check(mode, case(mode, activation=activation, bias=True, w13_order=GateUpOrder.INTERLEAVED))


@every_mode
@pytest.mark.parametrize("left_out", [Operand.W13_BIAS, Operand.W2_BIAS], ids=str)
def test_one_bias_alone(mode: str, left_out: Operand) -> None:
    made = case(mode, bias=True, bias_dtype=torch.float32 if "trtllm" in mode else None)
    operands = {operand: tensor for operand, tensor in made.operands.items() if operand is not left_out}
    check(mode, MoECase(replace(made.spec, **{f"has_{left_out}": False}), operands))


@every_mode
@pytest.mark.parametrize(
    "activation",
    [
        STEP,
        RELU2,
        ActivationSpec("gelu"),
        ActivationSpec("gelu_tanh"),
        ActivationSpec("silu", gated=False),
        ActivationSpec("gelu", gated=False),
        ActivationSpec("relu", gated=False),
        ActivationSpec("silu", beta=0.5, limit=1.0, up_limit=1.0),
    ],
    ids=str,
)
def test_activations(mode: str, activation: ActivationSpec) -> None:
    """Right, or refused."""
    name, arch, *_ = MODES[mode]
    made = case(mode, activation=activation, hidden_size=64, intermediate_size=64, num_tokens=5)
    if get_backend(name).check(made.spec, device(arch)).ok:
        check(mode, made)
    else:
        assert mode.startswith("trtllm"), "CUTLASS's have all of them"


@every_mode
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_routing_as_given(mode: str, weights_dtype: torch.dtype) -> None:
    check(mode, case(mode, outside_ids=True, weights_dtype=weights_dtype, ids_dtype=torch.int64, num_tokens=9))


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
    assert out.shape == (0, 128)
    assert out.dtype == torch.bfloat16
    assert not calls


def with_gate_and_up(made: MoECase, gate: torch.Tensor, up: torch.Tensor) -> MoECase:
    size = made.spec.intermediate_size
    rows = join_gate_up(gate.expand(-1, size), up.expand(-1, size), row_order(made.spec.w13_order))
    return MoECase(replace(made.spec, w13_global=GlobalGrain.HALF), {**made.operands, Operand.W13_GLOBAL: rows})


@pytest.mark.parametrize("mode", NVFP4_MODES)
@pytest.mark.parametrize("beta", [0.0, 0.7, RUNTIME], ids=str)
def test_unequal_globals_of_gate_and_up(mode: str, beta: Any) -> None:
    made = case(mode, activation=ActivationSpec("silu", beta=beta), w13_order=GateUpOrder.INTERLEAVED)
    factor = made.operands[Operand.W13_GLOBAL]
    check(mode, with_gate_and_up(made, factor, factor * (torch.rand(5, 1) + 0.5)))


def test_unequal_globals_with_biases() -> None:
    made = case("trtllm-nvfp4", bias=True)
    factor = made.operands[Operand.W13_GLOBAL]
    check("trtllm-nvfp4", with_gate_and_up(made, factor, factor * 1.7))
    made = with_gate_and_up(case("cutlass-nvfp4", bias=True), factor, factor * 1.7)
    refuses("cutlass-nvfp4", made, "one global scale for gate and up of an expert, for swiglu with biases")


def refuses(mode: str, made: MoECase, need: str) -> None:
    """It does before it has seen a weight; were it told otherwise, it would when it sees them."""
    name, arch, *_ = MODES[mode]
    backend = get_backend(name)
    found = [reason for reason in backend.check(made.spec, device(arch)).reasons if reason.need == need]
    assert [reason.code for reason in found] == [ReasonCode.FORMAT]
    told_otherwise = replace(made.spec, w13_global=GlobalGrain.EXPERT, w2_global=GlobalGrain.EXPERT)
    with pytest.raises(InexactWeightsError):
        run(mode, MoECase(told_otherwise, made.operands))


@pytest.mark.parametrize("mode", NVFP4_MODES)
def test_globals_that_no_scalar_holds_are_refused(mode: str) -> None:
    by_row = case(mode, global_scale="row")
    for name in ("w13", "w2"):
        refuses(mode, by_row, f"one global scale an expert in {name}")
    made = case(mode, activation=CLAMPED_SWIGLU)
    factor = made.operands[Operand.W13_GLOBAL]
    made = with_gate_and_up(made, factor, factor * 1.7)
    refuses(mode, made, f"one global scale for gate and up of an expert, for {CLAMPED_SWIGLU}")


@pytest.mark.parametrize("mode", NVFP4_MODES)
@pytest.mark.parametrize("zero", ["all", "gate", "up", "w2"])
@pytest.mark.parametrize("given", [{}, {"activation": ActivationSpec("silu", beta=0.5)}, {"bias": True}], ids=str)
def test_globals_of_zero(mode: str, zero: str, given: dict[str, Any]) -> None:
    """Those of an expert whose weights are all zero."""
    made = case(mode, idle_expert=False, **given)
    used = int(made.operands[Operand.TOPK_IDS][0, 0])
    w13, w2 = made.operands[Operand.W13_GLOBAL].clone(), made.operands[Operand.W2_GLOBAL].clone()
    gate, up = w13.clone(), w13.clone()
    for name, factor in (("gate", gate), ("up", up), ("w2", w2)):
        factor[used] = 0.0 if zero in ("all", name) else factor[used]
    made = MoECase(made.spec, {**made.operands, Operand.W2_GLOBAL: w2})
    if zero in ("gate", "up"):
        made = with_gate_and_up(made, gate, up)
        if "bias" in given and mode.startswith("cutlass"):
            return
    else:
        made = MoECase(made.spec, {**made.operands, Operand.W13_GLOBAL: gate})
    check(mode, made)


@pytest.mark.parametrize("mode", NVFP4_MODES)
def test_negative_and_zero_block_scales(mode: str) -> None:
    """The kernels read magnitudes."""
    check(mode, with_odd_block_scales(case(mode)))


@pytest.mark.parametrize("mode", NVFP4_MODES)
@pytest.mark.parametrize("scale", [0.0, 2.0**-20, 2.0**20])
def test_activations_of_any_size(mode: str, scale: float) -> None:
    made = case(mode)
    hidden = made.operands[Operand.HIDDEN] * scale
    check(mode, MoECase(made.spec, {**made.operands, Operand.HIDDEN: hidden}))


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode.startswith("trtllm")])
def test_many_tokens_go_in_pieces(mode: str, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_trtllm, "MAX_TOKENS", 4)
    check(mode, case(mode, num_tokens=9))
    assert calls.count(TRTLLM) == 3


def test_layers_alike_share_recipes() -> None:
    for mode, (name, arch, *_) in MODES.items():
        spec = case(mode, bias=True).spec
        first, second = (get_backend(name).plan(spec, device(arch)).prepared for _ in range(2))
        assert all(a is b for a, b in zip(first, second, strict=True)), mode


def test_a_build_is_announced_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    env, jit = ModuleType("env"), ModuleType("flashinfer.jit")
    env.FLASHINFER_AOT_DIR, env.FLASHINFER_JIT_DIR = tmp_path / "aot", tmp_path / "jit"  # type: ignore[attr-defined]
    jit.env = env  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer.jit", jit)
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)
    for folder, name in (("aot", "built"), ("jit", "kept"), ("wheel", "packaged")):
        (tmp_path / folder / name).mkdir(parents=True)
        (tmp_path / folder / name / f"{name}.so").touch()

    def said(*names: str) -> list[str]:
        caplog.clear()
        for name in names:
            announce_build(name, "which takes long")
        return [record.message for record in caplog.records]

    announce_build.cache_clear()
    told = "FlashInfer compiles {}, which takes long, once, into " + str(tmp_path / "jit")
    with caplog.at_level(logging.WARNING):
        assert said("built", "kept", "absent", "absent") == [told.format("absent")]
        assert said("packaged") == [told.format("packaged")]
        announce_build.cache_clear()
        env.FLASHINFER_AOT_DIRS = (tmp_path / "aot", tmp_path / "wheel")  # type: ignore[attr-defined]
        assert said("built", "packaged", "absent") == [told.format("absent")]
        announce_build.cache_clear()
        monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
        assert not said("absent"), "it will not be compiled"
    announce_build.cache_clear()


@pytest.mark.parametrize("mode", NVFP4_MODES)
@pytest.mark.parametrize("power", [-12, 0, 9])
def test_activations_are_quantised_by_their_own_largest(mode: str, power: int) -> None:
    """No checkpoint tells a scale for them: hidden states that NVFP4 holds are held, whatever their size."""
    made = case(mode)
    hidden = made.operands[Operand.HIDDEN] * 2.0**power
    w13 = made.operands[Operand.W13_GLOBAL] * 2.0**-power
    check(mode, MoECase(made.spec, {**made.operands, Operand.HIDDEN: hidden, Operand.W13_GLOBAL: w13}))


@pytest.mark.parametrize(
    ("largest", "as_good"), [(0.012, True), (1.0, True), (330.0, True), (6e-4, False), (700.0, False)]
)
def test_products_are_quantised_by_a_power_of_two(largest: float, as_good: bool) -> None:
    """As well as by a measured scale, for blocks of the sizes that ``PRODUCT_FACTOR`` tells."""
    assert torch.tensor(PRODUCT_FACTOR).log2().frac() == 0
    blocks = torch.rand(1, 64, 256) * 2 - 1
    blocks = largest * blocks / blocks.unflatten(2, (-1, 16)).abs().amax(-1).repeat_interleave(16, dim=2)

    def error(*factor: torch.Tensor) -> float:
        held = dequantize(*quantize_nvfp4(blocks, *factor), NVFP4, torch.float32)
        return float((held - blocks).norm() / blocks.norm())

    assert (error(torch.full((1, 1), PRODUCT_FACTOR)) < 1.2 * error()) is as_good
