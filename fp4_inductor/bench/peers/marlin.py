"""``marlin``: vLLM's Marlin GEMM for experts, between vLLM's routing operations."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.nn.functional as F

from ...backends.ops import ExpertWeights
from ...device import DeviceInfo
from ...random_layer import random_bias, random_codes, random_scales
from ...spec import MoESpec
from ..layers import Layer
from .base import CUDA, compiled_activation, vllm_files

LIBRARY = "FP4_INDUCTOR_MARLIN_LIBRARY"
"""Environment variable: the file of vLLM's MoE operations, where vLLM itself is not installed."""


class Marlin:
    """Pads H to a multiple of 256 and I to one of 128, as vLLM does."""

    name = "marlin"
    weights: tuple[str, ...] = ("mxfp4", "nvfp4")
    logits_dtype: torch.dtype | None = torch.float32

    def missing(self, device: DeviceInfo) -> str:
        given = os.environ.get(LIBRARY)
        files = [Path(given)] if given else vllm_files("_moe_C*.so")
        if not files:
            return f"vLLM is not installed, and {LIBRARY} does not name its _moe_C library"
        if not files[0].exists():
            return f"{LIBRARY} names {files[0]}, which does not exist"
        torch.ops.load_library(str(files[0]))
        return "" if hasattr(torch.ops._moe_C, "moe_wna16_marlin_gemm") else f"{files[0]} has no moe_wna16_marlin_gemm"

    def layer(self, spec: MoESpec) -> Layer:
        return _MarlinLayer(spec)


_FLOAT4_E2M1F_ID = 2 | 1 << 8 | 1 << 16 | 1 << 49
"""How vLLM packs that scalar type: exponent bits, mantissa bits from bit 8, signed bit 16, finite only bit 49."""

_MARLIN_BLOCKS = (8, 16, 32, 48, 64)


class _MarlinLayer:
    def __init__(self, spec: MoESpec) -> None:
        self.spec = spec
        self.hidden_size = -(-spec.hidden_size // 256) * 256
        self.intermediate_size = -(-spec.intermediate_size // 128) * 128
        self.w13 = self._weight(2 * self.intermediate_size, self.hidden_size, spec.has_w13_bias)
        self.w2 = self._weight(self.hidden_size, self.intermediate_size, spec.has_w2_bias)
        sm_count = torch.cuda.get_device_properties(CUDA).multi_processor_count
        self.workspace = torch.zeros(4 * sm_count, dtype=torch.int32, device=CUDA)
        self.activation = compiled_activation(spec.activation)

    def _weight(self, rows: int, columns: int, has_bias: bool) -> ExpertWeights:
        """Words of eight codes in tiles of 16 columns, scales [E, K/bs, N], and a bias [E, N]."""
        spec, fmt = self.spec, self.spec.weight_format
        codes = random_codes(CUDA, spec.num_experts, columns // 16, rows * 8).view(torch.int32)
        scale = random_scales(fmt, CUDA, spec.num_experts, columns // fmt.block_size, rows)
        if fmt.scale_encoding == "e8m0":
            scale = scale.view(torch.float8_e8m0fnu)
        global_scale = torch.ones(spec.num_experts, device=CUDA) if fmt.has_global_scale else None
        return ExpertWeights(codes, scale, global_scale, random_bias(spec, CUDA, rows) if has_bias else None)

    def __call__(self, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        tokens, spec = hidden.shape[0], self.spec
        slots, ops = tokens * spec.top_k, torch.ops._moe_C
        hidden = F.pad(hidden, (0, self.hidden_size - spec.hidden_size))
        weights = hidden.new_empty(tokens, spec.top_k, dtype=torch.float32)
        ids = hidden.new_empty(tokens, spec.top_k, dtype=torch.int32)
        ops.topk_softmax(weights, ids, torch.empty_like(ids), logits, True, None, None)
        block = next((b for b in _MARLIN_BLOCKS if slots < 0.9 * b * spec.num_experts), _MARLIN_BLOCKS[-1])
        aligned = self._align(ids, block)
        gate_up = hidden.new_empty(slots, 2 * self.intermediate_size)
        self._gemm(hidden, gate_up, self.w13, aligned, weights, block, down=False)
        h = self.activation(gate_up, None, None)
        y = hidden.new_empty(slots, self.hidden_size)
        self._gemm(h, y, self.w2, aligned, weights, block, down=True)
        out = torch.empty_like(hidden)
        ops.moe_sum(y.view(tokens, spec.top_k, -1), out, None, None)
        return out[:, : spec.hidden_size]

    def _align(self, ids: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slots in order of their experts, each expert's filled up to blocks; each block's expert; how many slots."""
        experts = self.spec.num_experts
        most = min(ids.numel() + experts * (block - 1), ids.numel() * block)
        order, owner = ids.new_empty(most), ids.new_empty(-(-most // block))
        count = ids.new_empty(1)
        torch.ops._moe_C.moe_align_block_size(ids, experts, block, order, owner, count, None, None)
        return order, owner, count

    def _gemm(
        self,
        rows: torch.Tensor,
        out: torch.Tensor,
        experts: ExpertWeights,
        aligned: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        weights: torch.Tensor,
        block: int,
        *,
        down: bool,
    ) -> None:
        torch.ops._moe_C.moe_wna16_marlin_gemm(
            rows,
            out,
            experts.codes,
            experts.bias,
            experts.scale,
            None,
            experts.global_scale,
            None,
            self.workspace,
            *aligned,
            weights,
            moe_block_size=block,
            top_k=1 if down else self.spec.top_k,
            mul_topk_weights=down,
            b_type_id=_FLOAT4_E2M1F_ID,
            size_m=rows.shape[0],
            size_n=out.shape[1],
            size_k=rows.shape[1],
            use_atomic_add=False,
            use_fp32_reduce=True,
            is_zp_float=False,
            thread_k=-1,
            thread_n=-1,
            blocks_per_sm=-1,
        )
