"""In which order kernels want w13's rows, and to which sizes weights are padded for them."""

from __future__ import annotations

from typing import NamedTuple

from .cutlass_sm90 import COLUMNS
from .gate_up import UP_GATE, RowOrder
from .scale_128x4 import TILE_ROWS


class KernelRows(NamedTuple):
    """w13's order where it is gated, and what H and I are to be multiples of, where gated and where not."""

    order: RowOrder
    hidden: int
    intermediate: int
    intermediate_ungated: int

    def multiple(self, gated: bool) -> int:
        """What the intermediate size is to be a multiple of."""
        return self.intermediate if gated else self.intermediate_ungated


PAIRS = RowOrder(1, up_first=True)
"""u0, g0, u1, g1, ...: TRTLLM's, before rows are shuffled."""
BLOCKS_OF_64 = RowOrder(64, up_first=True)
"""64 up rows, their 64 gate rows, ...: CuTe-DSL's."""

# Whole tiles along K (256 by H), whole tiles of scales by 128 rows, four scales a row.
TRTLLM_MXFP4 = KernelRows(PAIRS, 256, TILE_ROWS, TILE_ROWS)
TRTLLM_NVFP4 = KernelRows(PAIRS, 256, TILE_ROWS // 2, TILE_ROWS)
# Its scales of w13 are checked to end where I does, and tiles of them have 128 rows.
CUTLASS_NVFP4 = KernelRows(UP_GATE, 64, 64, TILE_ROWS)
CUTLASS_MXFP4_MXFP8 = KernelRows(UP_GATE, 128, 128, 128)
CUTLASS_MXFP4_SM90 = KernelRows(UP_GATE, COLUMNS, COLUMNS, COLUMNS)
CUTEDSL_NVFP4 = KernelRows(BLOCKS_OF_64, 256, 64, 128)
CUTEDSL_MXFP4 = KernelRows(BLOCKS_OF_64, 256, 128, 128)
# It pads I to 128, or to 256 for few tokens, by itself, and then keeps a second copy of all weights.
B12X = KernelRows(UP_GATE, 128, 256, 256)
# Its kernels for bfloat16 activations repack weights in any case, in tiles of 64 by 128.
B12X_BF16 = KernelRows(UP_GATE, 128, 128, 128)
