"""The timed call: hidden states and router logits in, hidden states out, on random weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from ..formats import BlockFormat
from ..plan import KernelPlan, prepare, run_plan
from ..spec import MoESpec, Operand

ROTATED_UP_TO = 1024
"""Most tokens for which several inputs take turns; beyond, every expert is read and one input does."""

_ROTATED = 8
_SCALE_BYTES = {"e8m0": (118, 122), "e4m3": (0x28, 0x48)}
"""Scales from 2**-9 to 2**-6 for e8m0; from a quarter to four for e4m3, which has a global scale too."""

Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From hidden [T, H] and logits [T, E] to [T, H]."""


def random_weights(spec: MoESpec, device: torch.device) -> dict[Operand, torch.Tensor]:
    """Canonical weights of ``spec``: all codes random, outputs of order one."""
    fmt, found = spec.weight_format, {}
    sizes = (
        (Operand.W13, spec.w13_rows, spec.hidden_size, spec.has_w13_bias),
        (Operand.W2, spec.hidden_size, spec.intermediate_size, spec.has_w2_bias),
    )
    for operand, rows, columns, has_bias in sizes:
        experts = spec.num_experts
        found[operand] = random_codes(device, experts, rows, columns // 2)
        found[Operand(f"{operand}_scale")] = random_scales(fmt, device, experts, rows, columns // fmt.block_size)
        if fmt.has_global_scale:
            found[Operand(f"{operand}_global")] = torch.full((experts, 1), 0.5 / math.sqrt(columns), device=device)
        if has_bias:
            found[Operand(f"{operand}_bias")] = random_bias(spec, device, rows)
    return found


def random_codes(device: torch.device, *shape: int) -> torch.Tensor:
    """uint8 of ``shape``, two codes a byte."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


def random_scales(fmt: BlockFormat, device: torch.device, *shape: int) -> torch.Tensor:
    """Block scales of ``shape`` in the dtype that ``fmt`` stores them in."""
    low, high = _SCALE_BYTES[fmt.scale_encoding]
    return torch.randint(low, high, shape, dtype=torch.uint8, device=device).view(fmt.scale_dtype)


def random_bias(spec: MoESpec, device: torch.device, rows: int) -> torch.Tensor:
    """[E, rows] in the activation dtype."""
    return torch.randn(spec.num_experts, rows, device=device).mul_(0.1).to(spec.act_dtype)


def route(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the best k of logits [T, E]: ids [T, k] int64 and weights [T, k] float32."""
    values, ids = logits.topk(top_k, dim=-1)
    return ids, values.softmax(-1, dtype=torch.float32)


def planned_layer(spec: MoESpec, plan: KernelPlan, weights: Mapping[Operand, torch.Tensor]) -> Layer:
    """The planned call on prepared weights; it keeps no canonical weight that the plan does not read as it is.

    Logits go to the op where the plan takes them, and are routed by torch operations where it does not.
    """
    prepared = prepare(plan, weights)
    direct = {arg: weights[arg] for arg in plan.args if isinstance(arg, Operand) and arg in weights}
    takes_logits = Operand.ROUTER_LOGITS in plan.operands
    top_k = spec.top_k

    def layer(hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        operands = {**direct, Operand.HIDDEN: hidden}
        if takes_logits:
            operands[Operand.ROUTER_LOGITS] = logits
        else:
            operands[Operand.TOPK_IDS], operands[Operand.TOPK_WEIGHTS] = route(logits, top_k)
        return run_plan(plan, operands, prepared)

    return layer


def inputs(spec: MoESpec, num_tokens: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Hidden states [T, H] and router logits [T, E] that take turns, every expert equally likely.

    The same for every call with the same arguments, so that all who are timed get the same.
    """
    rng = torch.Generator(device).manual_seed(num_tokens)
    made = []
    for _ in range(_ROTATED if num_tokens <= ROTATED_UP_TO else 1):
        hidden = torch.randn(num_tokens, spec.hidden_size, generator=rng, device=device).mul_(0.1)
        logits = torch.randn(num_tokens, spec.num_experts, generator=rng, device=device)
        made.append((hidden.to(spec.act_dtype), logits.to(spec.act_dtype)))
    return made
