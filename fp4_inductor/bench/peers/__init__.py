"""Kernels of others that run the same block, where they are installed: adapters from logits to output.

Each holds weights in its own layout. Random bytes are as good as converted ones where a peer's conversion is not at
hand: none of these kernels takes another path for other values.
"""

from __future__ import annotations

from .base import Peer as Peer
from .flashinfer_cutlass import FlashInferCutlass
from .ggml import Ggml
from .grouped_mm import GroupedMM
from .marlin import Marlin
from .triton_kernels import TritonKernels

PEERS: tuple[Peer, ...] = (TritonKernels(), Marlin(), FlashInferCutlass(), GroupedMM())
CPU_PEERS: tuple[Peer, ...] = (
    Ggml("ggml", ("mxfp4", "nvfp4"), repacked=False),
    Ggml("ggml_repack", ("mxfp4",), repacked=True),
)
