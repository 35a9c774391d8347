"""Dequantisation against float64, bit by bit, eager and compiled."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from fp4_inductor.formats import E2M1_VALUES, FORMATS, MXFP4, NVFP4, BlockFormat
from fp4_inductor.quant import dequantize
from fp4_inductor.quant.mxfp4 import decode_e8m0

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TABLE = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), dtype=torch.float64)


def every_byte_under_every_scale(fmt: BlockFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[256 scales, K/2]`` holding each byte in each row, scales ``[256, K/bs]``."""
    half = fmt.block_size // 2
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, half)
    scale = torch.arange(256, dtype=torch.uint8).unsqueeze(1).repeat(1, codes.shape[1] // half)
    return codes, scale.view(fmt.scale_dtype)


def reference(
    codes: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None, fmt: BlockFormat, dtype: torch.dtype
) -> torch.Tensor:
    """The table looked up, multiplied exactly in float64, rounded to float32 and then to ``dtype``."""
    values = torch.empty(*codes.shape[:-1], codes.shape[-1] * 2, dtype=torch.float64)
    values[..., 0::2] = TABLE[(codes % 16).long()]
    values[..., 1::2] = TABLE[(codes // 16).long()]
    if fmt == MXFP4:
        factor = torch.ldexp(torch.ones(scale.shape, dtype=torch.float64), scale.long() - 127)
        factor[scale == 255] = float("nan")
    else:
        factor = scale.double()
    values *= factor.repeat_interleave(fmt.block_size, dim=-1)
    if global_scale is not None:
        values *= global_scale.double().unsqueeze(-1)
    return values.float().to(dtype)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    bits = torch.int32 if actual.dtype == torch.float32 else torch.int16
    assert actual.dtype == expected.dtype
    is_nan = expected.isnan()
    assert torch.equal(actual.isnan(), is_nan)
    assert torch.equal(actual[~is_nan].view(bits), expected[~is_nan].view(bits))


def global_scale_of(fmt: BlockFormat, rows: int) -> torch.Tensor | None:
    if not fmt.has_global_scale:
        return None
    return torch.rand(rows, generator=torch.Generator().manual_seed(0)) * 1e-3 + 1e-6


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_byte_and_scale_is_exact(fmt: BlockFormat, dtype: torch.dtype) -> None:
    codes, scale = every_byte_under_every_scale(fmt)
    global_scale = global_scale_of(fmt, 256)
    assert_same_bits(
        dequantize(codes, scale, global_scale, fmt, dtype), reference(codes, scale, global_scale, fmt, dtype)
    )


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_compiled_is_exact(fmt: BlockFormat) -> None:
    codes, scale = every_byte_under_every_scale(fmt)
    global_scale = global_scale_of(fmt, 256)

    def all_dtypes(codes: torch.Tensor, scale: torch.Tensor, gs: torch.Tensor | None) -> list[torch.Tensor]:
        return [dequantize(codes, scale, gs, fmt, dtype) for dtype in DTYPES]

    compiled = torch.compile(all_dtypes, backend="inductor", fullgraph=True)
    for actual in compiled(codes, scale, global_scale):
        assert_same_bits(actual, reference(codes, scale, global_scale, fmt, actual.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "inductor"])
def test_gpu_is_exact(fmt: BlockFormat, compiled: bool) -> None:
    codes, scale = every_byte_under_every_scale(fmt)
    global_scale = global_scale_of(fmt, 256)
    fn = torch.compile(dequantize, backend="inductor", fullgraph=True) if compiled else dequantize
    for dtype in DTYPES:
        on_gpu = [None if t is None else t.cuda() for t in (codes, scale, global_scale)]
        assert_same_bits(fn(*on_gpu, fmt, dtype).cpu(), reference(codes, scale, global_scale, fmt, dtype))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_graph_holds_plain_ops_and_no_constants(fmt: BlockFormat) -> None:
    codes = torch.zeros(2, 8, 32, dtype=torch.uint8)
    scale = torch.zeros(2, 8, 64 // fmt.block_size, dtype=torch.uint8).view(fmt.scale_dtype)
    global_scale = torch.ones(2, 1) if fmt.has_global_scale else None
    seen: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, args: list[torch.Tensor]) -> torch.fx.GraphModule:
        seen.append(gm)
        return gm

    def run(codes: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None) -> torch.Tensor:
        return dequantize(codes, scale, global_scale, fmt)

    backend = aot_autograd(fw_compiler=keep)
    with torch.no_grad():
        torch.compile(run, backend=backend, fullgraph=True, dynamic=False)(codes, scale, global_scale)
    (gm,) = seen
    calls = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert not [node for node in gm.graph.nodes if node.op == "get_attr"]
    assert {op.namespace for op in calls} == {"aten"}
    names = {op.overloadpacket.__name__ for op in calls}
    assert not names & {"exp2", "pow", "ldexp", "index", "lift_fresh_copy", "scalar_tensor"}


def test_float16_overflows_and_underflows_as_a_cast_does() -> None:
    codes = torch.full((2, 16), 0x77, dtype=torch.uint8)  # sixes
    scale = torch.tensor([[127 + 14], [127 - 28]], dtype=torch.uint8)
    out = dequantize(codes, scale, None, MXFP4, torch.float16)
    assert out[0].isinf().all()
    assert (out[1] == 0).all()


@pytest.mark.parametrize("shape", [(1,), (3,)], ids=["per expert", "per row"])
def test_global_scale_broadcasts(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(256, (4, 3, 16), dtype=torch.uint8, generator=generator)
    scale = torch.rand(4, 3, 2, generator=generator).to(torch.float8_e4m3fn)
    global_scale = torch.rand(4, *shape, generator=generator)
    expected = reference(codes, scale, global_scale.expand(4, 3), NVFP4, torch.float32)
    assert_same_bits(dequantize(codes, scale, global_scale, NVFP4, torch.float32), expected)


def test_e8m0_agrees_with_torch() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    expected = bits.view(torch.float8_e8m0fnu).to(torch.float32)
    assert_same_bits(decode_e8m0(bits), expected)
