"""What is timed computes the block: from router logits to output, against float64."""

from __future__ import annotations

import pytest
import torch
from tolerances import assert_close_per_token

from fp4_inductor.backends import get_backend
from fp4_inductor.bench.layers import planned_layer
from fp4_inductor.bench.peers.grouped_mm import grouped_mm_layer
from fp4_inductor.bench.shapes import SHAPES, Shape, parse_shape
from fp4_inductor.device import DeviceInfo
from fp4_inductor.formats import MXFP4, NVFP4, BlockFormat
from fp4_inductor.layouts.gate_up import to_gate_up_halves
from fp4_inductor.plan import KernelPlan
from fp4_inductor.quant import dequantize
from fp4_inductor.random_layer import inputs, random_weights
from fp4_inductor.reference import moe_reference
from fp4_inductor.spec import GateUpOrder, MoESpec, Operand

CPU = torch.device("cpu")
GPT_OSS = Shape("tiny gpt-oss", 6, 2, 128, 96, gpt_oss=True)
PLAIN = parse_shape("5x3x64x128")


def reference(
    spec: MoESpec, weights: dict[Operand, torch.Tensor], hidden: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    """[T, H] float64: softmax over the k largest logits, written with a sort instead of ``topk``."""
    order = logits.double().argsort(dim=-1, descending=True, stable=True)[:, : spec.top_k]
    exp = logits.double().gather(1, order).exp()
    routed = {Operand.TOPK_IDS: order, Operand.TOPK_WEIGHTS: exp / exp.sum(-1, keepdim=True)}
    return moe_reference(spec, {**weights, Operand.HIDDEN: hidden, **routed})


@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)
@pytest.mark.parametrize("shape", [GPT_OSS, PLAIN], ids=lambda shape: shape.name)
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_our_layer_routes_and_computes(name: str, shape: Shape, fmt: BlockFormat) -> None:
    spec, info = shape.spec(fmt), DeviceInfo.parse("cpu")
    weights = random_weights(spec, CPU)
    layer = planned_layer(spec, get_backend(name).plan(spec, info), weights)
    for hidden, logits in inputs(spec, 9, CPU)[:2]:
        logits = logits.float() + torch.arange(spec.num_experts) * 1e-3  # no ties
        assert_close_per_token(layer(hidden, logits), reference(spec, weights, hidden, logits), torch.bfloat16)


def test_a_plan_that_takes_logits_gets_them() -> None:
    spec = PLAIN.spec(MXFP4)
    plan = KernelPlan("aten::mm", (Operand.ROUTER_LOGITS, Operand.W2_GLOBAL))
    eye = torch.eye(spec.num_experts)
    layer = planned_layer(spec, plan, {Operand.W2_GLOBAL: eye})
    hidden, logits = torch.randn(4, 64), torch.randn(4, spec.num_experts)
    torch.testing.assert_close(layer(hidden, logits), logits)


@pytest.mark.parametrize("shape", [GPT_OSS, PLAIN], ids=lambda shape: shape.name)
def test_grouped_mm_computes_the_same_block(shape: Shape) -> None:
    spec = shape.spec(MXFP4)
    packed = random_weights(spec, CPU)
    dense = {}
    for operand in (Operand.W13, Operand.W2):
        weight = dequantize(packed[operand], packed[Operand(f"{operand}_scale")], None, MXFP4, torch.bfloat16)
        interleaved = operand is Operand.W13 and spec.w13_order is GateUpOrder.INTERLEAVED
        dense[operand] = to_gate_up_halves(weight) if interleaved else weight
        bias = packed.get(Operand(f"{operand}_bias"))
        if bias is not None:
            dense[Operand(f"{operand}_bias")] = to_gate_up_halves(bias) if interleaved else bias
    layer = grouped_mm_layer(spec, dense)
    hidden, logits = inputs(spec, 17, CPU)[0]
    logits = logits.float() + torch.arange(spec.num_experts) * 1e-3
    with torch.compiler.set_stance("force_eager"):
        out = layer(hidden, logits)
    assert_close_per_token(out, reference(spec, packed, hidden, logits), torch.bfloat16)


def test_inputs_are_the_same_for_everybody_and_rotate() -> None:
    spec = SHAPES["qwen3-30b-a3b"].spec(MXFP4)
    first, again = inputs(spec, 2, CPU), inputs(spec, 2, CPU)
    assert len(first) == 8
    for (hidden, logits), (same_hidden, same_logits) in zip(first, again, strict=True):
        assert torch.equal(hidden, same_hidden)
        assert torch.equal(logits, same_logits)
    routed = {tuple(row.tolist()) for _, logits in first for row in logits.topk(8, dim=-1).indices}
    assert len(routed) == 16, "other inputs reach other experts"
    assert {t.dtype for pair in first for t in pair} == {torch.bfloat16}
    assert len(inputs(PLAIN.spec(MXFP4), 1025, CPU)) == 1


@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)
def test_random_weights_are_canonical(fmt: BlockFormat) -> None:
    spec = GPT_OSS.spec(fmt)
    weights = random_weights(spec, CPU)
    sizes = {operand: tuple(weight.shape) for operand, weight in weights.items()}
    expected = {
        Operand.W13: (6, 192, 64),
        Operand.W13_SCALE: (6, 192, 128 // fmt.block_size),
        Operand.W13_BIAS: (6, 192),
        Operand.W2: (6, 128, 48),
        Operand.W2_SCALE: (6, 128, 96 // fmt.block_size),
        Operand.W2_BIAS: (6, 128),
    }
    if fmt is NVFP4:
        expected |= {Operand.W13_GLOBAL: (6, 1), Operand.W2_GLOBAL: (6, 1)}
    assert sizes == expected
    dense = dequantize(
        weights[Operand.W13], weights[Operand.W13_SCALE], weights.get(Operand.W13_GLOBAL), fmt, torch.float64
    )
    assert 0.003 < dense.std() < 0.5, "neither vanishing nor overflowing"
    assert len(weights[Operand.W13].unique()) == 256
