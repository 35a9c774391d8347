"""``flashinfer``: CUTLASS kernels for MXFP4 weights and bfloat16 activations on sm_90."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F

from ...device import DeviceInfo
from ...random_layer import random_bias, random_codes, random_scales, route
from ...spec import MoESpec
from ..layers import Layer
from .base import CUDA


class FlashInferCutlass:
    """Pads H and I to multiples of 128, which its scale layout asks for."""

    name = "flashinfer"
    weights: tuple[str, ...] = ("mxfp4",)
    logits_dtype: torch.dtype | None = None

    def missing(self, device: DeviceInfo) -> str:
        if importlib.util.find_spec("flashinfer") is None:
            return "flashinfer is not installed"
        if device.arch != 90:
            return f"its kernels for MXFP4 weights and bfloat16 activations are for sm_90, this is {device.arch_name}"
        from flashinfer.jit import env

        name = "fused_moe_90"
        folders = (env.FLASHINFER_AOT_DIR, env.FLASHINFER_JIT_DIR)
        if any((folder / name / f"{name}.so").exists() for folder in folders):
            return ""
        return f"flashinfer's {name} is not built, and building it on the first call takes an hour or more"

    def layer(self, spec: MoESpec) -> Layer:
        import flashinfer

        hidden_size, intermediate_size = (-(-size // 128) * 128 for size in (spec.hidden_size, spec.intermediate_size))

        def weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
            """Codes [E, N, K/2], and scales in tiles of 64 rows and 128 columns."""
            tiles = (spec.num_experts, rows // 64, columns // 128, 16, 16)
            codes = random_codes(CUDA, spec.num_experts, rows, columns // 2)
            return codes, random_scales(spec.weight_format, CUDA, *tiles)

        w13, w13_scale = weight(2 * intermediate_size, hidden_size)
        w2, w2_scale = weight(hidden_size, intermediate_size)
        options: dict[str, Any] = {"quant_scales": [w13_scale, w2_scale], "use_w4_group_scaling": True}
        if spec.has_w13_bias:
            options["fc1_expert_biases"] = random_bias(spec, CUDA, 2 * intermediate_size)
            options["fc2_expert_biases"] = random_bias(spec, CUDA, hidden_size)
        if spec.activation.limit is not None:
            for knob in ("alpha", "beta", "limit"):
                value = getattr(spec.activation, knob)
                options[f"swiglu_{knob}"] = torch.full((spec.num_experts,), value, device=CUDA)
        tuned: set[int] = set()

        def layer(hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            tokens = hidden.shape[0]
            ids, scores = route(logits, spec.top_k)
            rows = F.pad(hidden, (0, hidden_size - spec.hidden_size))
            with flashinfer.autotune(tokens not in tuned):  # the first call of each size is the warm-up
                out: torch.Tensor = flashinfer.fused_moe.cutlass_fused_moe(
                    rows, ids.to(torch.int32), scores, w13, w2, spec.out_dtype, **options
                )[0]
            tuned.add(tokens)
            return out[:, : spec.hidden_size]

        return layer
