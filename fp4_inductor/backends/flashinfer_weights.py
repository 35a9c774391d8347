"""What FlashInfer's kernels take of a layer's weights: rows in their order, padded, and factors one an expert.

Tensors are prepared from canonical operands. NVFP4 block scales are unsigned there, so signs go into the codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from ..formats import BlockFormat
from ..layouts.gate_up import RowOrder, reorder_gate_up, row_order
from ..layouts.global_scales import common_globals, expert_globals, gate_up_globals
from ..layouts.kernel_rows import KernelRows
from ..layouts.lane_scales import absorb_scale_signs
from ..layouts.padding import fit_columns, fit_gate_up, fit_rows, round_up
from ..plan import Prepared
from ..spec import MoESpec, Operand

PRODUCT_FACTOR = 2.0**-3
"""What e4m3 times e2m1 is multiplied by before the down projection, where products of gate and up become NVFP4.

Its block scales are then exact to three bits for blocks whose largest product is between 0.012 and 336; below 0.001 a
block is zero, above 336 it saturates. A measured factor would have to come with the checkpoint.
"""

_NEXT_TO_ZERO = 2.0**-64


def nonzero(global_scale: torch.Tensor) -> torch.Tensor:
    """Global scales to divide by: for zero, an expert's whose weights all are, one too small to show in a result."""
    return torch.where(global_scale == 0, _NEXT_TO_ZERO, global_scale)


@cache
def ones(name: str, suffix: str) -> Prepared:
    """float32 [E] in the place of a format's global scales that it does not have; ``name``: w13 or w2."""
    return Prepared(f"{name}_ones_{suffix}", _ones, (Operand(name),))


def _ones(codes: torch.Tensor) -> torch.Tensor:
    return torch.ones(codes.shape[0], dtype=torch.float32, device=codes.device)


@dataclass(frozen=True, slots=True)
class Placing:
    """Where a layer's rows come from and go to. ``source`` is None where nothing is gated."""

    num_experts: int
    source: RowOrder | None
    target: RowOrder
    hidden_size: int
    intermediate_size: int

    @classmethod
    def of(cls, spec: MoESpec, rows: KernelRows) -> Placing:
        gated = spec.activation.gated
        return cls(
            spec.num_experts,
            row_order(spec.w13_order) if gated else None,
            rows.order,
            round_up(spec.hidden_size, rows.hidden),
            round_up(spec.intermediate_size, rows.multiple(gated)),
        )

    def w13(self, rows: torch.Tensor) -> torch.Tensor:
        """w13's rows [E, 2I | I, ...] in the kernel's order, padded."""
        if self.source is None:
            return fit_rows(rows, self.intermediate_size)
        padded = fit_gate_up(rows, self.source, self.intermediate_size)
        return reorder_gate_up(padded, self.source, self.target)

    def rows(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Rows of ``name``, w13 or w2, in the kernel's order, padded: biases [E, N]."""
        return self.w13(tensor) if name == "w13" else fit_rows(tensor, self.hidden_size)

    def matrix(self, name: str, tensor: torch.Tensor, per_column: int) -> torch.Tensor:
        """``rows`` of codes or scales [E, N, K / per_column], columns padded too."""
        columns = self.hidden_size if name == "w13" else self.intermediate_size
        return fit_columns(self.rows(name, tensor), columns // per_column)

    def codes(self, name: str, fmt: BlockFormat, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """uint8 codes, with the signs of e4m3 block scales."""
        signed = absorb_scale_signs(codes, scale) if fmt.scale_encoding == "e4m3" else codes
        return self.matrix(name, signed, 2)

    def scales(self, name: str, fmt: BlockFormat, scale: torch.Tensor) -> torch.Tensor:
        """Block scales' bits, uint8, without signs."""
        bits = scale.view(torch.uint8)
        return self.matrix(name, bits & 0x7F if fmt.scale_encoding == "e4m3" else bits, fmt.block_size)

    def product_globals(self, w2_global: torch.Tensor) -> torch.Tensor:
        """w2's factors float32 [E] for products that were quantised with ``PRODUCT_FACTOR``."""
        return expert_globals(w2_global, self.num_experts) * PRODUCT_FACTOR

    def globals(self, common: bool, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gate's and up's factors float32 [E]; the only one and None where nothing is gated.

        Raises:
            InexactWeightsError: they differ where the kernel needs ``common`` ones, or within an expert's rows.
        """
        global_scale = nonzero(global_scale)
        if self.source is None:
            return expert_globals(global_scale, self.num_experts), None
        gate, up = gate_up_globals(global_scale, self.source, self.num_experts)
        if not common:
            return gate, up
        both = common_globals(gate, up)
        return both, both.clone()
