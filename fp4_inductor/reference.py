"""The one truth: a mixture-of-experts block from its ``MoESpec`` in plain torch, one expert at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from .formats import BlockFormat
from .quant import dequantize
from .spec import ActivationSpec, GateUpOrder, MoESpec, Operand


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
        return _apply(gate_up, activation)
    if order is GateUpOrder.INTERLEAVED:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    else:
        gate, up = gate_up.chunk(2, dim=-1)
        if order is GateUpOrder.UP_GATE:
            gate, up = up, gate
    if activation.limit is not None:
        gate = gate.clamp(max=_number(activation.limit))
        up = up.clamp(-_number(activation.limit), _number(activation.limit))
    return _apply(gate, activation) * (up + _number(activation.beta))


def _apply(x: torch.Tensor, activation: ActivationSpec) -> torch.Tensor:
    if activation.kind == "silu":
        return x * torch.sigmoid(x * _number(activation.alpha))
    if activation.kind == "gelu":
        return F.gelu(x)
    if activation.kind == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if activation.kind == "relu":
        return F.relu(x)
    return F.relu(x).square()


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
        gate_up = hidden[token] @ _expert(operands, "w13", expert, spec, dtype).T
        if spec.has_w13_bias:
            gate_up += operands[Operand.W13_BIAS][expert].to(dtype)
        y = activate(gate_up, activation, spec.w13_order) @ _expert(operands, "w2", expert, spec, dtype).T
        if spec.has_w2_bias:
            y += operands[Operand.W2_BIAS][expert].to(dtype)
        out.index_add_(0, token, y * weights[token, slot].unsqueeze(-1))
    return out


def _expert(
    operands: Mapping[Operand, torch.Tensor], name: str, expert: int, spec: MoESpec, dtype: torch.dtype
) -> torch.Tensor:
    codes, scale = operands[Operand(name)], operands[Operand(f"{name}_scale")]
    return dequantized_expert(codes, scale, operands.get(Operand(f"{name}_global")), expert, spec.weight_format, dtype)


def resolve_scalars(activation: ActivationSpec, operands: Mapping[Operand, torch.Tensor]) -> ActivationSpec:
    """``activation`` with its RUNTIME fields read from ``operands``."""
    given = {
        field: float(operands[operand])
        for field, operand in (("alpha", Operand.ALPHA), ("beta", Operand.BETA), ("limit", Operand.LIMIT))
        if operand in operands
    }
    return ActivationSpec(
        kind=activation.kind,
        gated=activation.gated,
        alpha=given.get("alpha", activation.alpha),
        beta=given.get("beta", activation.beta),
        limit=given.get("limit", activation.limit),
    )
