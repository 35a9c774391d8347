"""``triton_kernels``: OpenAI's routing and matrix products with fused gather, activation and scatter."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ...device import DeviceInfo
from ...random_layer import random_weights
from ...spec import MoESpec, Operand
from ..layers import Layer
from .base import CUDA, vllm_files


class TritonKernels:
    """OpenAI's ``triton_kernels``: under its own name, or as vLLM carries it."""

    name = "triton_kernels"
    weights: tuple[str, ...] = ("mxfp4",)
    logits_dtype: torch.dtype | None = None

    def missing(self, device: DeviceInfo) -> str:
        if importlib.util.find_spec(self.name) is None:
            vendored = vllm_files(f"third_party/{self.name}/__init__.py")
            if not vendored:
                return "neither triton_kernels nor vLLM is installed"
            _import_as(self.name, vendored[0])
        if importlib.util.find_spec(f"{self.name}.matmul_ogs") is None:
            return "the installed triton_kernels has no matmul_ogs: another version, or another project of this name"
        return ""

    def layer(self, spec: MoESpec) -> Layer:
        return triton_kernels_layer(spec, random_weights(spec, CUDA))


def triton_kernels_layer(spec: MoESpec, weights: dict[Operand, torch.Tensor]) -> Layer:
    """The block on canonical MXFP4 weights, gate and up interleaved. Its activation always adds one to up."""
    from triton_kernels import matmul_ogs as ogs
    from triton_kernels.matmul_ogs_details.opt_flags import update_opt_flags_constraints
    from triton_kernels.numerics import InFlexData
    from triton_kernels.routing import routing
    from triton_kernels.swiglu import swiglu_fn
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details import layout

    update_opt_flags_constraints({"split_k": 1})  # as vLLM sets it for these weights on sm_90
    codes_layout, codes_options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    scale_layout, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)

    def weight(name: Operand) -> tuple[Any, Any, torch.Tensor | None]:
        codes = wrap_torch_tensor(weights[name].transpose(-2, -1), dtype=FP4)
        scale = weights[Operand(f"{name}_scale")]
        scale = wrap_torch_tensor(F.pad(scale, (0, -scale.shape[-1] % 4)).transpose(-2, -1))
        config = ogs.PrecisionConfig(
            weight_scale=convert_layout(scale, scale_layout, **scale_options),
            flex_ctx=ogs.FlexCtx(rhs_data=InFlexData()),
        )
        bias = weights.get(Operand(f"{name}_bias"))
        return convert_layout(codes, codes_layout, **codes_options), config, None if bias is None else bias.float()

    w13, w13_config, w13_bias = weight(Operand.W13)
    w2, w2_config, w2_bias = weight(Operand.W2)
    limit = torch.finfo(torch.float32).max if spec.activation.limit is None else spec.activation.limit
    swiglu = ogs.FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"))
    activation = ogs.FusedActivation(swiglu, (spec.activation.alpha, limit), 2)
    top_k = spec.top_k

    def layer(hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        routed, gather, scatter = routing(logits, top_k, sm_first=False)
        h = ogs.matmul_ogs(
            hidden, w13, w13_bias, routed, gather_indx=gather, precision_config=w13_config, fused_activation=activation
        )
        out: torch.Tensor = ogs.matmul_ogs(
            h, w2, w2_bias, routed, scatter_indx=scatter, precision_config=w2_config, gammas=routed.gate_scal
        )
        return out

    return layer


def _import_as(name: str, init: Path) -> None:
    """Import the package whose ``__init__.py`` is ``init`` under a name that its own modules know it by."""
    spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=[str(init.parent)])
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
