"""What stands beside us on a CPU: reading alone, and ggml where it is installed."""

from __future__ import annotations

import pytest
import torch

from fp4_inductor.bench.cpu import read_layer
from fp4_inductor.bench.peers import CPU_PEERS
from fp4_inductor.bench.peers.ggml import ggml_layer, to_ggml_blocks
from fp4_inductor.bench.shapes import Shape
from fp4_inductor.device import DeviceInfo
from fp4_inductor.formats import MXFP4, NVFP4, BlockFormat
from fp4_inductor.random_layer import random_weights, route
from fp4_inductor.reference import moe_reference
from fp4_inductor.spec import Operand

CPU = DeviceInfo.parse("cpu")
formats = pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)


@formats
def test_blocks_of_ggml_hold_scales_and_then_halves(fmt: BlockFormat) -> None:
    codes = torch.randint(0, 256, (1, 2, 64), dtype=torch.uint8)
    scale = torch.randint(1, 99, (1, 2, 128 // fmt.block_size), dtype=torch.uint8).view(fmt.scale_dtype)
    blocks = to_ggml_blocks(codes, scale, fmt)[0, 1]
    scales = 1 if fmt is MXFP4 else 4
    columns = scales * fmt.block_size
    blocks = blocks.view(-1, scales + columns // 2)
    assert torch.equal(blocks[:, :scales].flatten(), scale.view(torch.uint8)[0, 1])
    nibbles = torch.stack((codes[0, 1] & 15, codes[0, 1] >> 4), dim=-1).flatten()
    half = fmt.block_size // 2
    assert torch.equal(blocks[1, scales : scales + half] & 15, nibbles[columns : columns + half])
    assert torch.equal(blocks[1, scales : scales + half] >> 4, nibbles[columns + half : columns + 2 * half])


@formats
def test_reading_computes_nothing(fmt: BlockFormat) -> None:
    read = read_layer(Shape("small", 8, 2, 128, 64).spec(fmt))
    assert read is not None
    hidden = torch.randn(3, 128).bfloat16()
    assert read(hidden, torch.randn(3, 8)) is hidden
    assert read_layer(Shape("odd", 8, 2, 72, 64).spec(fmt)) is None


@pytest.mark.parametrize("gpt_oss", [False, True], ids=["plain", "gpt-oss"])
@pytest.mark.parametrize("peer", CPU_PEERS, ids=lambda peer: peer.name)
@formats
def test_ggml_computes_the_same_block(peer: object, fmt: BlockFormat, gpt_oss: bool) -> None:
    """Five times as far off as a bfloat16 kernel is, since it rounds activations to eight bits."""
    missing = peer.missing(CPU)  # type: ignore[attr-defined]
    if missing:
        pytest.skip(missing)
    if fmt.name not in peer.weights:  # type: ignore[attr-defined]
        pytest.skip(f"{peer.name} has no {fmt}")  # type: ignore[attr-defined]
    spec = Shape("small", 8, 4, 512, 256, gpt_oss=gpt_oss).spec(fmt)
    weights = random_weights(spec, torch.device("cpu"), torch.Generator().manual_seed(0))
    layer = ggml_layer(spec, weights, repacked=peer.name == "ggml_repack")  # type: ignore[attr-defined]
    for tokens in (1, 20):
        hidden, logits = torch.randn(tokens, 512).bfloat16(), torch.randn(tokens, 8)
        ids, scores = route(logits, spec.top_k)
        given = {**weights, Operand.HIDDEN: hidden, Operand.TOPK_IDS: ids, Operand.TOPK_WEIGHTS: scores}
        expected = moe_reference(spec, given)
        error = (layer(hidden, logits).double() - expected).norm() / expected.norm()
        assert 3e-3 < error < 3e-2
