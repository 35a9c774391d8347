"""Random blocks for every backend's tests: a spec and canonical operands that fit it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from fp4_inductor.patterns.router_formulas import router_reference

from fp4_inductor.formats import BlockFormat
from fp4_inductor.reference import moe_reference
from fp4_inductor.spec import (
    ACTIVATION_KNOBS,
    RUNTIME,
    ActivationSpec,
    GateUpOrder,
    GlobalGrain,
    MoESpec,
    Operand,
    RouterSpec,
)

SWIGLU = ActivationSpec("silu")
CLAMPED_SWIGLU = ActivationSpec("silu", alpha=1.702, beta=1.0, limit=2.0)
"""The gpt-oss activation; the limit is low so that random inputs reach it."""

RUNTIME_SWIGLU = ActivationSpec("silu", alpha=RUNTIME, beta=RUNTIME, limit=RUNTIME)

ACTIVATIONS = [
    SWIGLU,
    CLAMPED_SWIGLU,
    ActivationSpec("silu", limit=1.0),
    ActivationSpec("gelu"),
    ActivationSpec("gelu_tanh"),
    ActivationSpec("relu"),
    ActivationSpec("relu2", gated=False),
    ActivationSpec("gelu", gated=False),
    ActivationSpec("silu", alpha=RUNTIME, beta=RUNTIME, limit=RUNTIME, up_limit=RUNTIME),
    ActivationSpec("silu", limit=0.5, bound="clamp_activated"),
    ActivationSpec("gelu", limit=0.5, up_limit=1.5, bound="softcap"),
    ActivationSpec("relu2", gated=False, limit=0.5),
]
"""Every kind and every bound, with knobs as literals and as operands."""


@dataclass(frozen=True)
class MoECase:
    spec: MoESpec
    operands: Mapping[Operand, torch.Tensor]

    def reference(self) -> torch.Tensor:
        """[T, H] float64, from a CPU copy of the operands."""
        return moe_reference(self.spec, {operand: tensor.cpu() for operand, tensor in self.operands.items()})


def make_case(
    fmt: BlockFormat,
    *,
    num_tokens: int = 7,
    num_experts: int = 5,
    top_k: int = 2,
    hidden_size: int = 128,
    intermediate_size: int = 96,
    activation: ActivationSpec = SWIGLU,
    act_dtype: torch.dtype = torch.bfloat16,
    weights_dtype: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
    ids_dtype: torch.dtype = torch.int64,
    w13_order: GateUpOrder = GateUpOrder.GATE_UP,
    bias: bool = False,
    bias_dtype: torch.dtype | None = None,
    global_scale: Literal["tensor", "expert", "row"] = "row",
    outside_ids: bool = False,
    idle_expert: bool = True,
    amplitude: float = 1.0,
    scalars: tuple[float, float, float, float] = (1.702, 1.0, 2.0, 1.5),
    seed: int = 0,
    device: str = "cpu",
) -> MoECase:
    """A random block whose gate, up and output values are of order ``amplitude``.

    Args:
        global_scale: how finely global scales differ (formats that have one).
        outside_ids: some ids lie outside [0, E), and token 0 has no expert at all.
        idle_expert: one expert gets no token (where top_k leaves one free).
        scalars: values of alpha, beta, limit and up_limit where the activation declares them RUNTIME.
    """
    grain = GlobalGrain.ROW if fmt.has_global_scale and global_scale == "row" else GlobalGrain.EXPERT
    spec = MoESpec(
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        weight_format=fmt,
        activation=activation,
        act_dtype=act_dtype,
        weights_dtype=weights_dtype,
        out_dtype=act_dtype if out_dtype is None else out_dtype,
        w13_order=w13_order,
        has_w13_bias=bias,
        has_w2_bias=bias,
        w13_global=grain,
        w2_global=grain,
    )
    rng = torch.Generator(device).manual_seed(seed)
    ids = random_ids(num_tokens, spec, rng, idle=idle_expert, outside=outside_ids)
    weights = torch.rand(num_tokens, top_k, generator=rng, device=device) + 0.1
    operands = {
        Operand.HIDDEN: (torch.randn(num_tokens, hidden_size, generator=rng, device=device) * amplitude).to(act_dtype),
        Operand.TOPK_IDS: ids.to(ids_dtype),
        Operand.TOPK_WEIGHTS: (weights / weights.sum(-1, keepdim=True)).to(weights_dtype),
        **random_weight("w13", num_experts, spec.w13_rows, hidden_size, fmt, rng, global_scale),
        **random_weight("w2", num_experts, hidden_size, intermediate_size, fmt, rng, global_scale),
    }
    if bias:
        dtype = act_dtype if bias_dtype is None else bias_dtype
        for operand, rows in ((Operand.W13_BIAS, spec.w13_rows), (Operand.W2_BIAS, hidden_size)):
            operands[operand] = torch.randn(num_experts, rows, generator=rng, device=device).to(dtype)
    for (field, operand), value in zip(ACTIVATION_KNOBS.items(), scalars, strict=True):
        if getattr(activation, field) is RUNTIME:
            operands[operand] = torch.tensor(value, dtype=torch.float64)
    return MoECase(spec, operands)


def with_ids_far_outside(case: MoECase) -> MoECase:
    """``case`` with ids that kernels which read 16 or 32 bits of them would take for experts 0 and 1."""
    ids = case.operands[Operand.TOPK_IDS].clone()
    ids[:3, 0] = 1 << 16
    ids[3:, 0] = (1 << 32) + 1
    return MoECase(case.spec, {**case.operands, Operand.TOPK_IDS: ids})


def with_experts_named_again(case: MoECase) -> MoECase:
    """``case``, of four experts a token, with tokens that name one of them twice, and one that names one four times."""
    ids = case.operands[Operand.TOPK_IDS].clone()
    ids[1:4, 2], ids[4] = ids[1:4, 0], 3
    return MoECase(case.spec, {**case.operands, Operand.TOPK_IDS: ids})


def with_router(case: MoECase, router: RouterSpec, logits: torch.Tensor) -> MoECase:
    """``case`` with ``router`` without a bias, and with the experts that it chooses by ``logits`` [T, E]."""
    ids, weights = router_reference(router, logits.double().cpu(), case.spec.top_k, None, 1.0)
    chosen = {
        Operand.ROUTER_LOGITS: logits,
        Operand.TOPK_IDS: ids.to(logits.device),
        Operand.TOPK_WEIGHTS: weights.to(logits.device, case.spec.weights_dtype),
    }
    return MoECase(replace(case.spec, router=router), {**case.operands, **chosen})


def with_odd_block_scales(case: MoECase) -> MoECase:
    """``case`` with some e4m3 block scales negative, and some negative zeros."""
    operands = dict(case.operands)
    for operand in (Operand.W13_SCALE, Operand.W2_SCALE):
        bits = operands[operand].view(torch.uint8).clone()
        bits[:, ::3] |= 0x80
        bits[:, 1::7, ::2] = 0x80
        operands[operand] = bits.view(torch.float8_e4m3fn)
    return MoECase(case.spec, operands)


def random_ids(num_tokens: int, spec: MoESpec, rng: torch.Generator, *, idle: bool, outside: bool) -> torch.Tensor:
    """ids int64 [T, k], distinct for each token."""
    priority = torch.rand(num_tokens, spec.num_experts, generator=rng, device=rng.device)
    if idle and spec.num_experts > spec.top_k:
        priority[:, spec.num_experts // 2] = -1
    ids = priority.topk(spec.top_k, dim=-1).indices
    if outside:
        strange = torch.tensor([-1, spec.num_experts, spec.num_experts + 7], device=rng.device)
        drawn = torch.randint(0, 3, ids.shape, generator=rng, device=rng.device)
        dropped = torch.rand(ids.shape, generator=rng, device=rng.device) < 0.3
        dropped[:1] = True
        ids = torch.where(dropped, strange[drawn], ids)
    return ids


def random_weight(
    name: str,
    num_experts: int,
    rows: int,
    columns: int,
    fmt: BlockFormat,
    rng: torch.Generator,
    global_scale: Literal["tensor", "expert", "row"] = "row",
) -> dict[Operand, torch.Tensor]:
    """Canonical codes, scales and globals: random bytes as codes, weights of standard deviation about 1/sqrt(K)."""
    device = rng.device
    shape = (num_experts, rows, columns // fmt.block_size)
    typical = 1 / (2.93 * math.sqrt(columns))  # 2.93 is the standard deviation of a random e2m1 code
    codes = torch.randint(0, 256, (num_experts, rows, columns // 2), generator=rng, device=device, dtype=torch.uint8)
    operands = {Operand(name): codes}
    if fmt.scale_encoding == "e8m0":
        middle = 127 + round(math.log2(typical))
        scale = torch.randint(middle - 3, middle + 2, shape, generator=rng, device=device, dtype=torch.uint8)
    else:
        # Bits 0x28..0x47 are 0.25..3.75: every mantissa, four exponents.
        bits = torch.randint(0x28, 0x48, shape, generator=rng, device=device, dtype=torch.uint8)
        scale = bits.view(fmt.scale_dtype)
    operands[Operand(f"{name}_scale")] = scale
    if fmt.has_global_scale:
        size = {"tensor": (1, 1), "expert": (num_experts, 1), "row": (num_experts, rows)}[global_scale]
        factor = torch.rand(size, generator=rng, device=device) + 0.5
        operands[Operand(f"{name}_global")] = factor * (typical / (1.4 if fmt.scale_encoding == "e4m3" else 1))
    return operands


def poison_allocator(device: str = "cuda", num_bytes: int = 256 << 20) -> None:
    """Fill memory that the caching allocator will hand out next with NaN bits, so that unwritten output shows."""
    for size in (num_bytes, *(2**power for power in range(10, 25))):
        block = torch.full((size // 4,), float("nan"), device=device)
        del block


EXPERTS_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "gpt_oss": {
        "num_experts": 8,
        "top_k": 4,
        "hidden_size": 192,
        "intermediate_size": 192,
        "activation": CLAMPED_SWIGLU,
        "w13_order": GateUpOrder.INTERLEAVED,
        "bias": True,
        "amplitude": 2.0,
    },
    "up_first": {"w13_order": GateUpOrder.UP_GATE, "bias": True, "bias_dtype": torch.float32},
    "odd_sizes": {"num_experts": 33, "top_k": 5, "hidden_size": 160, "intermediate_size": 32, "num_tokens": 4},
    "one_token": {"num_tokens": 1, "num_experts": 7, "top_k": 3},
    "long_rows": {"num_tokens": 1, "hidden_size": 608, "intermediate_size": 32, "bias": True},
    "one_expert": {"num_tokens": 5, "num_experts": 1, "top_k": 1},
    "many_tokens": {"num_tokens": 301, "num_experts": 3, "hidden_size": 64, "intermediate_size": 64},
    "outside_ids": {"num_tokens": 40, "outside_ids": True, "ids_dtype": torch.int32, "bias": True},
    "outside_many": {"num_tokens": 150, "num_experts": 4, "outside_ids": True, "hidden_size": 64},
    "runtime_scalars": {"activation": RUNTIME_SWIGLU, "amplitude": 2.0},
    "gelu": {"activation": ActivationSpec("gelu")},
    "gelu_tanh": {"activation": ActivationSpec("gelu_tanh", limit=1.5)},
    "relu": {"activation": ActivationSpec("relu", beta=0.5)},
    "relu2": {"activation": ActivationSpec("relu2")},
    "limit_after": {"activation": ActivationSpec("silu", limit=0.5, bound="clamp_activated"), "amplitude": 2.0},
    "two_limits": {"activation": ActivationSpec("silu", beta=1.0, limit=0.7, up_limit=1.3), "amplitude": 2.0},
    "softcap": {
        "activation": ActivationSpec("silu", limit=1.5, up_limit=2.5, bound="softcap"),
        "amplitude": 2.0,
        "bias": True,
    },
    "runtime_softcap": {
        "activation": ActivationSpec("gelu", limit=RUNTIME, up_limit=RUNTIME, bound="softcap"),
        "amplitude": 2.0,
    },
    "not_gated_limit": {"activation": ActivationSpec("relu2", gated=False, limit=0.8), "bias": True},
    "not_gated_limit_after": {"activation": ActivationSpec("silu", gated=False, limit=0.3, bound="clamp_activated")},
    "not_gated_softcap": {"activation": ActivationSpec("gelu_tanh", gated=False, limit=0.9, bound="softcap")},
    "not_gated": {"activation": ActivationSpec("relu2", gated=False), "bias": True, "top_k": 3},
    "float16": {"act_dtype": torch.float16, "bias": True, "weights_dtype": torch.float16},
    "low_weights": {"weights_dtype": torch.bfloat16, "global_scale": "tensor"},
    "float32_out": {"out_dtype": torch.float32, "global_scale": "expert"},
}
"""Keyword arguments of ``make_case``: every knob of an experts op at least once."""
