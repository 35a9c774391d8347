"""Single steps of a formula: which of them treat some values unlike others, and the numbers that they mention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .probing import constant_value
from .resizing import op_name

CLAMPS = {"clamp", "clamp_min", "clamp_max", "clip", "minimum", "maximum", "hardtanh"}

CUTTING = CLAMPS | {"relu", "where", "masked_fill", "lt", "le", "gt", "ge"}
"""The selecting operations that a formula of the catalogue may be spelled with."""

SELECTING = CUTTING | {
    "fmin", "fmax", "relu6", "threshold", "hardsigmoid", "hardswish", "leaky_relu", "eq", "ne", "isfinite", "isnan",
    "isinf", "nan_to_num", "sign", "sgn", "signbit", "abs", "floor", "ceil", "round", "trunc", "fmod", "remainder",
    "copysign", "heaviside", "elu", "celu", "selu", "softplus", "softshrink", "hardshrink",
}  # fmt: skip
"""Operations that treat some values unlike others, so that no finite number of probes speaks for all."""

LOGICAL = {
    "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not", "__and__", "__or__",
}  # fmt: skip

LAYOUT = {
    "split", "split_with_sizes", "chunk", "unbind", "slice", "select", "view", "reshape", "_unsafe_view", "clone",
    "expand", "unsqueeze", "squeeze", "permute", "transpose", "_to_copy", "convert_element_type", "lift_fresh_copy",
    "alias", "detach", "full", "scalar_tensor", "getitem", "copy", "masked_fill", "where", "fma", "contiguous",
}  # fmt: skip

_RELATIVE, _ABSOLUTE = 1e-7, 1e-12
"""Constants that were float32 once differ by 6e-8; gelu and gelu_tanh by 1e-4."""


def name_of(node: fx.Node) -> str:
    """The ATen operation that ``node`` calls, "" where it calls none."""
    return op_name(node.target) if isinstance(node.target, torch._ops.OpOverload) else ""


def numbers(node: fx.Node) -> list[float]:
    """The numbers that a node mentions, sizes and axes left out."""
    value = constant_value(node)
    if value is not None:
        return [float(item) for item in value.detach().flatten().tolist()] if value.numel() <= 16 else []
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    name = op_name(node.target)
    pointwise = torch.Tag.pointwise in node.target.tags or name in ("masked_fill", "where")
    if name in ("full", "scalar_tensor"):
        args: Sequence[Any] = node.args[-1:]
    elif pointwise and name not in ("clone", "convert_element_type"):
        args = (*node.args, *(item for key, item in node.kwargs.items() if key in ("min", "max", "other", "alpha")))
    else:
        return []
    return [float(item) for item in args if isinstance(item, (int, float)) and not isinstance(item, bool)]


def near(got: torch.Tensor, want: torch.Tensor, magnitude: torch.Tensor | float = 1.0) -> torch.Tensor:
    """Where float64 values are one formula's up to rounding; ``magnitude`` bounds what cancels."""
    error = (got - want).abs()
    # All is near to infinity, so only finite values are measured.
    return (want.isfinite() & (error <= _RELATIVE * want.abs() + _ABSOLUTE * magnitude)) | (got == want)


def close(got: torch.Tensor, want: torch.Tensor, magnitude: torch.Tensor | float = 1.0) -> bool:
    """Whether two float64 tensors are one formula's values up to rounding."""
    return bool(near(got, want, magnitude).all())
