"""The CuTe-DSL backends beside FlashInfer itself, where it is installed: devices, activations, its own references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flashinfer_stand_in import fp4_quantize, mxfp8_quantize, real
from moe_cases import CLAMPED_SWIGLU, SWIGLU, MoECase
from test_flashinfer_cute import GEGLU_TANH, MODES, RELU2, case, device
from tolerances import assert_close_per_token
from torch.nn.functional import pad

from fp4_inductor.backends import flashinfer_b12x, flashinfer_cutedsl
from fp4_inductor.backends.flashinfer_common import Mode
from fp4_inductor.backends.flashinfer_cute_common import NO_LIMIT
from fp4_inductor.plan import prepare, run_plan
from fp4_inductor.spec import ActivationSpec, GateUpOrder, Operand

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
ARCHITECTURES = (80, 86, 89, 90, 100, 103, 120, 121)
"""Those that are known here."""


@pytest.fixture
def calls() -> None:
    """Nothing stands in for FlashInfer here."""


@pytest.mark.parametrize(
    ("module", "function"), [(flashinfer_cutedsl, "cute_dsl_fused_moe"), (flashinfer_b12x, "b12x_fused_moe")]
)
def test_devices_are_those_of_the_functions(module: Any, function: str) -> None:
    declared = real(f"fused_moe.{function}").is_compute_capability_supported
    for mode in module.MODES:
        assert {arch for arch in ARCHITECTURES if declared(arch)} == mode.architectures


@pytest.mark.parametrize("mode", [*flashinfer_cutedsl.MODES, *flashinfer_b12x.MODES], ids=str)
def test_devices_and_activations_are_those_of_the_runners(mode: Mode) -> None:
    names = {"bf16": "B12xW4A16", "nvfp4": "B12xNvfp4", "mxfp4": None}
    name = "CuteDsl" if mode in flashinfer_cutedsl.MODES else names[mode.name]
    if name is None:
        known = real("fused_moe.cute_dsl.blackwell_sm12x.moe_activation").SUPPORTED_MOE_ACTIVATIONS
        assert known == {"silu", "swigluoai_uninterleave", "gelu_tanh", "relu2"}
        assert mode.functions == {"Swiglu", "GegluTanh", "Relu2"}
        return
    runner, formats = real(f"fused_moe.runners.{name}Runner"), real("fused_moe.api.QuantFormat")
    assert (formats[mode.weights.name.upper()], formats[mode.name.upper()]) in runner.supported_quant_variants
    assert mode.functions == {activation.type.name for activation in runner.supported_activation_classes} - {"Situ"}
    supported = real(f"fused_moe.{name}Config").supported
    assert {arch for arch in ARCHITECTURES if supported(arch)} == mode.architectures


def test_defaults_and_limits_are_theirs() -> None:
    enums = real("tllm_enums")
    assert (enums.DEFAULT_SWIGLU_ALPHA, enums.DEFAULT_SWIGLU_BETA, enums.DEFAULT_SWIGLU_LIMIT) == (1.0, 0.0, NO_LIMIT)
    for limit, valid in ((NO_LIMIT, True), (7.0, True), (0.0, False), (float("inf"), False)):
        for check in _limit_checks():
            if valid:
                check(limit)
            else:
                with pytest.raises(ValueError, match="swiglu_limit"):
                    check(limit)


def _limit_checks() -> list[Any]:
    cutedsl = real("fused_moe.cute_dsl.moe_utils").validate_cute_dsl_moe_swiglu_config
    b12x = real("fused_moe.cute_dsl.blackwell_sm12x.moe_activation").normalize_swiglu_limit_for_activation
    return [lambda limit: cutedsl(1.0, 0.0, limit), lambda limit: b12x("swigluoai_uninterleave", limit)]


def linear(view: torch.Tensor, rows: int, columns: int, block: int) -> torch.Tensor:
    """Block scales [E, rows, columns / block] of a six-dimensional view, or of tiles, by their own functions."""
    experts = view.shape[-1] if view.dim() == 6 else view.shape[0]
    if view.dim() == 6:
        read = real("cute_dsl.utils.convert_sf_from_mma_layout")
        view = read(view, rows, columns, num_groups=experts, sf_vec_size=block)
    unswizzle = real("trace.templates.gemm._unswizzle_batched_sf_128x4")
    return unswizzle(view, experts, rows, columns // block)


def in_halves(rows: torch.Tensor, gated: bool) -> torch.Tensor:
    """Two blocks of up and gate in halves: the interleaving of four things by two undoes itself."""
    if not gated:
        return rows
    assert rows.shape[1] == 256
    return real("fused_moe.prepare")._interleave_linear_and_gate(rows, group_size=64, dim=1)


def cutedsl_reference(**given: Any) -> torch.Tensor:
    """Theirs takes w13 in halves, and scales in rows, but for w4a8; what quantises products it leaves out."""
    gated, block = given["activation_type"] != 6, 32 if given["quant_mode"] == "w4a8" else 16
    for name in ("w1", "w2"):
        codes = given[f"{name}_weight"]
        scale = linear(given[f"{name}_weight_sf"], codes.shape[1], codes.shape[2] * 2, block)
        if name == "w1":
            codes, scale = in_halves(codes, gated), in_halves(scale, gated)
        if block == 32:
            tiles = real("experimental.b12x._lib.intrinsics").swizzle_block_scale(scale)
            view, columns = real("cute_dsl.utils.convert_sf_to_mma_layout"), codes.shape[2] * 2
            scale = view(tiles, codes.shape[1], columns, num_groups=len(codes), sf_vec_size=block)
        given |= {f"{name}_weight": codes, f"{name}_weight_sf": scale}
    if given["fc2_input_scale"] is not None:
        given["w2_alpha"] = given["w2_alpha"] * given["fc2_input_scale"]
    return real("trace.templates.moe._cute_dsl_fused_moe_reference")(**given)


def b12x_reference(**given: Any) -> torch.Tensor:
    """Theirs takes scales in rows and only SwiGLU; what divides products it would multiply them by."""
    mxfp4 = given["quant_mode"] == "mxfp4"
    weights = []
    for name in ("w1", "w2"):
        codes = given[f"{name}_weight"]
        scale = linear(given[f"{name}_weight_sf"], codes.shape[1], codes.shape[2] * 2, 32 if mxfp4 else 16)
        numbers = real("trace.templates.moe._dequantize_fp4_tensor")(codes, scale, is_ue8m0_scales=mxfp4)
        weights.append(numbers * given[f"{name}_alpha"].view(-1, 1, 1))
    if given.get("fc2_input_scale") is not None:
        weights[1] = weights[1] / given["fc2_input_scale"].view(-1, 1, 1)
    ids, experts = given["token_selected_experts"].to(torch.int64), given["num_experts"]
    run = real("trace.templates.moe._b12x_moe_run_experts")
    return run(given["x"], *weights, given["token_final_scales"], ids, 0, experts, "bf16", None)


REFERENCES = {"cutedsl": cutedsl_reference, "b12x": b12x_reference}


REFERENCED = [(mode, SWIGLU) for mode in MODES]
REFERENCED += [(mode, other) for mode in MODES if "cutedsl" in mode for other in (CLAMPED_SWIGLU, GEGLU_TANH, RELU2)]
"""Theirs for b12x knows plain SwiGLU only."""


@pytest.mark.parametrize(("mode", "activation"), REFERENCED, ids=str)
@pytest.mark.parametrize("order", GateUpOrder, ids=str)
def test_through_their_references(
    mode: str, activation: ActivationSpec, order: GateUpOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The op calls FlashInfer's reference, which reads by itself what was prepared."""
    kind = mode.split("-")[0]
    backend, arch, *_ = MODES[mode]
    made: MoECase = case(mode, activation=activation, hidden_size=160, intermediate_size=96, w13_order=order)
    function = {"cutedsl": "cute_dsl_fused_moe", "b12x": "b12x_fused_moe"}[kind]
    real(f"fused_moe.{function}")
    monkeypatch.setattr(f"flashinfer.fused_moe.{function}", REFERENCES[kind])
    monkeypatch.setattr("flashinfer.fp4_quantize", fp4_quantize)
    monkeypatch.setattr("flashinfer.mxfp8_quantize", mxfp8_quantize)
    out = run_plan(backend.plan(made.spec, device(arch)), made.operands)
    assert_close_per_token(out, made.reference(), torch.bfloat16)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gated", [True, False])
def test_weights_are_bit_for_bit_what_their_functions_prepare(mode: str, gated: bool) -> None:
    backend, arch, *_ = MODES[mode]
    hidden, inner = (160, 96) if "cutedsl" in mode else (96, 224)
    activation = SWIGLU if gated else RELU2
    made = case(mode, activation=activation, hidden_size=hidden, intermediate_size=inner)
    plan = backend.plan(made.spec, device(arch))
    ready, suffix = prepare(plan, made.operands), mode.replace("-", "_")
    block, rows = made.spec.weight_format.block_size, -(-inner // 128) * 128
    if mode in ("b12x-nvfp4", "b12x-mxfp4"):
        rows = 256
    columns = 256 if "cutedsl" in mode else 128
    swizzle = real("experimental.b12x._lib.intrinsics").swizzle_block_scale
    for operand, name, per_column in ((Operand.W13, "w13", 2), (Operand.W13_SCALE, "w13_scale", block)):
        given = made.operands[operand].view(torch.uint8)
        halves = given.flatten(1).unflatten(1, (2, inner, -1)).flip(1) if gated else given.unsqueeze(1)
        theirs = pad(halves, (0, columns // per_column - given.shape[2], 0, rows - inner)).flatten(1, 2)
        if gated and "cutedsl" in mode:
            theirs = real("fused_moe.prepare")._interleave_linear_and_gate(theirs, group_size=64, dim=1)
        named = f"{name}_{suffix}" if f"{name}_{suffix}" in ready else "w13_scale_b12x_packable"
        ours = ready[named].view(torch.uint8)
        assert torch.equal(ours, swizzle(theirs) if name == "w13_scale" else theirs.contiguous()), name
