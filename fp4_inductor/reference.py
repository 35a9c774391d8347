"""The one truth: a mixture-of-experts block from its ``MoESpec`` in plain torch, one expert at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import pi, sqrt

import torch
import torch.nn.functional as F

from .formats import BlockFormat
from .quant import dequantize
from .spec import ACTIVATION_KNOBS, ActivationSpec, GateUpOrder, MoESpec, Operand


def activate(gate_up: torch.Tensor, activation: ActivationSpec, order: GateUpOrder) -> torch.Tensor:
    """Apply a gated or plain expert activation.

    Args:
        gate_up: [..., 2I] if gated, else [..., I]; any float dtype, in which it is computed.
        activation: with no RUNTIME field.
        order: how gate and up share the last axis.

    Returns:
        [..., I], dtype of ``gate_up``.
    """
    if not activation.gated:
        return gate_factor(gate_up, activation)
    gate, up = split_gate_up(gate_up, order)
    return gate_factor(gate, activation) * up_factor(up, activation)


def split_gate_up(gate_up: torch.Tensor, order: GateUpOrder) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up ``[..., I]`` each, views of ``gate_up`` ``[..., 2I]``."""
    if order is GateUpOrder.INTERLEAVED:
        return gate_up[..., ::2], gate_up[..., 1::2]
    first, second = gate_up.tensor_split(2, dim=-1)
    return (first, second) if order is GateUpOrder.GATE_UP else (second, first)


def gate_factor(gate: torch.Tensor, activation: ActivationSpec) -> torch.Tensor:
    """``act(gate)``, bounded: same shape and dtype; no field of ``activation`` is RUNTIME."""
    if activation.limit is None:
        return _act(gate, gate, activation)
    limit = _number(activation.limit)
    if activation.bound == "softcap":
        return _act(gate, _softcap(gate, limit), activation)
    if activation.bound == "clamp_activated":
        return _act(gate, gate, activation).clamp(max=limit)
    gate = gate.clamp(max=limit)
    return _act(gate, gate, activation)


def up_factor(up: torch.Tensor, activation: ActivationSpec) -> torch.Tensor:
    """``up + beta``, bounded: same shape and dtype; no field of ``activation`` is RUNTIME."""
    limit = activation.limit if activation.up_limit is None else activation.up_limit
    if limit is not None:
        size = _number(limit)
        up = _softcap(up, size) if activation.bound == "softcap" else up.clamp(-size, size)
    return up + _number(activation.beta)


def _act(x: torch.Tensor, factor: torch.Tensor, activation: ActivationSpec) -> torch.Tensor:
    """``factor * s(x)``, which is ``act(x)`` where the factor is x."""
    if activation.kind == "silu":
        return factor * torch.sigmoid(x * _number(activation.alpha))
    if activation.kind == "gelu":
        return factor * (0.5 * (1 + torch.erf(x * sqrt(0.5))))
    if activation.kind == "gelu_tanh":
        return factor * torch.sigmoid(sqrt(8 / pi) * (x + 0.044715 * x * x * x))
    if activation.kind == "relu":
        return torch.where(x > 0, factor, 0.0)
    assert activation.kind == "relu2", f"{activation.kind} is no activation"
    return factor * F.relu(x)


def _softcap(x: torch.Tensor, limit: float) -> torch.Tensor:
    return torch.tanh(x / limit) * limit


def _number(value: object) -> float:
    assert isinstance(value, int | float), f"{value!r} must be resolved before the reference runs"
    return float(value)


def dequantized_expert(
    codes: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    expert: int,
    fmt: BlockFormat,
    dtype: torch.dtype,
) -> torch.Tensor:
    """One expert's weight ``[N, K]`` from canonical codes [E, N, K/2], scale [E, N, K/bs], global [E|1, N|1]."""
    row = None
    if global_scale is not None:
        row = global_scale[expert if global_scale.shape[0] > 1 else 0]
    return dequantize(codes[expert], scale[expert], row, fmt, dtype)


def moe_reference(
    spec: MoESpec, operands: Mapping[Operand, torch.Tensor], dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Compute the block with every intermediate in ``dtype``.

    Args:
        spec: what to compute; RUNTIME scalars are read from ``operands``.
        operands: canonical tensors, see ``Operand``.
        dtype: compute and result dtype; float64 is the yardstick of the tests.

    Returns:
        [T, H] in ``dtype``. Ids outside the experts contribute nothing.
    """
    activation = resolve_scalars(spec.activation, operands)
    hidden = operands[Operand.HIDDEN].to(dtype)
    ids, weights = operands[Operand.TOPK_IDS], operands[Operand.TOPK_WEIGHTS].to(dtype)
    out = torch.zeros_like(hidden)
    for expert in ids.unique().tolist():
        if not 0 <= expert < spec.num_experts:
            continue
        token, slot = (ids == expert).nonzero(as_tuple=True)
        rows, factor = hidden[token], weights[token, slot].unsqueeze(-1)
        if spec.weight_on_input:
            rows, factor = rows * factor, torch.ones_like(factor)
        gate_up = rows @ _expert(operands, "w13", expert, spec, dtype).T
        if spec.has_w13_bias:
            gate_up += operands[Operand.W13_BIAS][expert].to(dtype)
        y = activate(gate_up, activation, spec.w13_order) @ _expert(operands, "w2", expert, spec, dtype).T
        if spec.has_w2_bias:
            y += operands[Operand.W2_BIAS][expert].to(dtype)
        out.index_add_(0, token, y * factor)
    return out


def _expert(
    operands: Mapping[Operand, torch.Tensor], name: str, expert: int, spec: MoESpec, dtype: torch.dtype
) -> torch.Tensor:
    codes, scale = operands[Operand(name)], operands[Operand(f"{name}_scale")]
    return dequantized_expert(codes, scale, operands.get(Operand(f"{name}_global")), expert, spec.weight_format, dtype)


def resolve_scalars(activation: ActivationSpec, operands: Mapping[Operand, torch.Tensor]) -> ActivationSpec:
    """``activation`` with its RUNTIME fields read from ``operands``."""
    given = {field: float(operands[knob]) for field, knob in ACTIVATION_KNOBS.items() if knob in operands}
    return replace(activation, **given)  # type: ignore[arg-type]
