"""Whole blocks through FlashInfer's own pure-torch references: what was prepared, read back by its code, is the block.

Its functions for kernels only un-shuffle for one activation, so the steps are put together here: its un-tiling and
un-shuffling of weights, its reading of e2m1 and of scales, its experts in float32. Scalars are multiplied into the
weights that they stand for.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import flashinfer_stand_in
import pytest
import torch
from flashinfer_stand_in import CUTLASS, TRTLLM, is_like, real
from moe_cases import CLAMPED_SWIGLU, SWIGLU
from test_flashinfer import MODES, RELU2, case, check

from fp4_inductor.spec import ActivationSpec, GateUpOrder

GEGLU_TANH = ActivationSpec("gelu_tanh")


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """FlashInfer's references, in the place of its kernels."""
    real("fused_moe.cutlass_fused_moe")
    from flashinfer.trace.templates import moe

    monkeypatch.setattr(f"flashinfer.{CUTLASS}", lambda **given: [cutlass(moe, **given)])
    monkeypatch.setattr(f"flashinfer.{TRTLLM}", lambda **given: [trtllm(moe, **given)])
    for name in (flashinfer_stand_in.FP4_QUANTIZE, flashinfer_stand_in.MXFP8_QUANTIZE):
        monkeypatch.setattr(f"flashinfer.{name}", getattr(flashinfer_stand_in, name))
    return moe


def dense(moe: ModuleType, codes: torch.Tensor, scale: torch.Tensor, block: int) -> torch.Tensor:
    """float32 [E, N, K] from codes and tiles of scales, rows as they stand."""
    from flashinfer.trace.templates.gemm import _unswizzle_batched_sf_128x4

    experts, rows, columns = codes.shape
    # Rows that only fill the last tile are not told to kernels that stop before them.
    whole = torch.zeros(experts, -(-rows // 128) * 128, scale.shape[-1], dtype=torch.uint8)
    whole[:, : scale.shape[1]] = scale.view(torch.uint8)
    grid = _unswizzle_batched_sf_128x4(whole, experts, rows, columns * 2 // block)
    numbers = grid if block == 32 else grid.view(torch.float8_e4m3fn)
    return moe._dequantize_fp4_tensor(codes, numbers, is_ue8m0_scales=block == 32)


def experts_of(
    moe: ModuleType, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, routes: Any, activation: int, **knobs: Any
) -> torch.Tensor:
    """The block [T, H] with biases: w13's as a column that meets a one, w2's as its sum over experts."""
    bias1, bias2 = knobs.pop("bias1"), knobs.pop("bias2")
    ids, weights = routes
    if bias1 is not None:
        x, w1 = torch.cat((x, torch.ones_like(x[:, :1])), 1), torch.cat((w1, bias1.float().unsqueeze(-1)), 2)
        # Their result is as wide as the input.
        w2 = torch.cat((w2, torch.zeros_like(w2[:, :1])), 1)
    out = moe._moe_bf16_run_experts(
        x, w1, w2, weights.float(), ids.long(), 0, w1.shape[0], activation_type=activation, **knobs
    )
    if bias1 is not None:
        out = out[:, :-1]
    if bias2 is not None:
        out = (out.float() + (weights.float().unsqueeze(-1) * bias2.float()[ids.long()]).sum(1)).bfloat16()
    return out


def cutlass(moe: ModuleType, **given: Any) -> torch.Tensor:
    x, scales, block = given["input"].float(), given["quant_scales"], 32
    quantise1, quantise2 = torch.tensor(1.0), torch.ones(given["fc1_expert_weights"].shape[0])
    if given.get("use_mxfp8_act_scaling"):
        s1, alpha1, s2, alpha2 = scales
    else:
        quantise1, s1, alpha1, quantise2, s2, alpha2 = scales
        block = 16
    w1, w2 = (given[f"fc{n}_expert_weights"].view(torch.uint8) for n in (1, 2))
    w1 = dense(moe, w1, s1.view(torch.uint8), block) * (quantise1 * alpha1)[:, None, None]
    w2 = dense(moe, w2, s2.view(torch.uint8), block) * (quantise2 * alpha2)[:, None, None]
    return experts_of(
        moe,
        x,
        w1,
        w2,
        (given["token_selected_experts"], given["token_final_scales"]),
        int(given["activation_type"]),
        bias1=given["fc1_expert_biases"],
        bias2=given["fc2_expert_biases"],
        gemm1_alpha=given["swiglu_alpha"],
        gemm1_beta=given["swiglu_beta"],
        gemm1_clamp_limit=given["swiglu_limit"],
    )


def trtllm(moe: ModuleType, **given: Any) -> torch.Tensor:
    nvfp4 = given["output1_scale_scalar"] is not None
    activation, gated = given["activation_type"], given["activation_type"] != 6
    block = 16 if nvfp4 else 32
    x = moe._dequantize_fp4_hidden_states(given["hidden_states"], given["hidden_states_scale"], False)
    w1, w2 = (dense(moe, given[f"gemm{n}_weights"], given[f"gemm{n}_weights_scale"], block) for n in (1, 2))
    w1, w2 = moe._trtllm_unshuffle_weight(w1, gated), moe._trtllm_unshuffle_weight(w2, False)
    biases = {"bias1": None, "bias2": None}
    for n, rows_gated in ((1, gated), (2, False)):
        if (bias := given[f"gemm{n}_bias"]) is not None:
            is_like(bias, torch.float32, *bias.shape)
            biases[f"bias{n}"] = moe._trtllm_unshuffle_weight(bias.unsqueeze(-1), rows_gated).squeeze(-1)
    knobs = {f"gemm1_{knob}": given[f"gemm1_{knob}"] for knob in ("alpha", "beta", "clamp_limit")}
    if nvfp4:
        out1, gate, out2 = (
            given[f"output{n}_scale_{s}"] for n, s in ((1, "scalar"), (1, "gate_scalar"), (2, "scalar"))
        )
        half = given["intermediate_size"] if gated else 0
        rows = torch.cat((out1[:, None].expand(-1, half), gate[:, None].expand(-1, w1.shape[1] - half)), 1)
        w1 = w1 * rows.unsqueeze(-1)
        # What is not gated is scaled behind its activation.
        w2 = w2 * (out2 if gated else out2 * out1)[:, None, None]
        biases = {
            "bias1": None if biases["bias1"] is None else biases["bias1"] * rows,
            "bias2": None if biases["bias2"] is None else biases["bias2"] * out2[:, None],
        }
        knobs["gemm1_beta"] = None if knobs["gemm1_beta"] is None else knobs["gemm1_beta"] * out1
    return experts_of(moe, x, w1, w2, given["topk_ids"], activation, **biases, **knobs)


BLOCKS = (
    (SWIGLU, GateUpOrder.GATE_UP),
    (CLAMPED_SWIGLU, GateUpOrder.INTERLEAVED),
    (ActivationSpec("silu", alpha=1.702, beta=0.5), GateUpOrder.UP_GATE),
    (GEGLU_TANH, GateUpOrder.INTERLEAVED),
    (RELU2, GateUpOrder.GATE_UP),
)
NOT_THEIRS = (
    # what TRTLLM's kernels do not compute, and a limit in two units, of which their experts take one
    *(("trtllm-bf16", GEGLU_TANH), ("trtllm-mxfp8", GEGLU_TANH), ("trtllm-nvfp4", GEGLU_TANH)),
    *(("trtllm-bf16", RELU2), ("trtllm-nvfp4", CLAMPED_SWIGLU)),
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    ("mode", "activation", "order"),
    [
        (mode, activation, order)
        for mode in MODES
        for activation, order in BLOCKS
        if mode != "cutlass-bf16" and (mode, activation) not in NOT_THEIRS
    ],
    ids=str,
)
def test_the_block_comes_back(
    mode: str, activation: ActivationSpec, order: GateUpOrder, bias: bool, theirs: ModuleType
) -> None:
    sizes = {"hidden_size": 160, "intermediate_size": 96}
    check(mode, case(mode, activation=activation, w13_order=order, bias=bias, bias_dtype=torch.bfloat16, **sizes))
