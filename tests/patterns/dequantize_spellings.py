"""Ways to write the dequantisation of FP4 weights, and graphs that hold them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from fp4_inductor.patterns.dequantize import identify
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fp4_inductor.formats import BlockFormat
from fp4_inductor.matching import Assembled, PackedWeight, Source

E, N, K = 5, 48, 96
LUT = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
Tensor = torch.Tensor


def name_of(value: object) -> str | None:
    return getattr(value, "__name__", None)


def lut_codes(codes: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    table = torch.tensor(LUT, dtype=dtype)
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1)
    return table[nibbles.int()].reshape(*codes.shape[:-1], -1)


def slice_assigned_codes(codes: Tensor) -> Tensor:
    table = torch.tensor(LUT, dtype=torch.bfloat16)
    out = torch.empty(*codes.shape[:-1], codes.shape[-1] * 2, dtype=torch.bfloat16)
    out[..., 0::2] = table[(codes & 15).long()]
    out[..., 1::2] = table[(codes >> 4).long()]
    return out


def bit_codes(codes: Tensor) -> Tensor:
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).reshape(*codes.shape[:-1], -1).to(torch.int32)
    exponent, mantissa = (nibbles >> 1) & 3, nibbles & 1
    normal = ((exponent + 126) << 23) | (mantissa << 22)
    subnormal = mantissa * (126 << 23)
    bits = torch.where(exponent == 0, subnormal, normal) | ((nibbles & 8) << 28)
    return bits.view(torch.float32)


def masked_codes(codes: Tensor) -> Tensor:
    """The way torchao writes it: constants put where masks say, then bits shifted into place."""
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).reshape(*codes.shape[:-1], -1)
    sign, magnitude = nibbles & 8, nibbles & 7
    wide = magnitude.to(torch.int32)
    result = (((wide >> 1) - 1 + 127) << 23) | ((wide & 1) << 22)
    result[magnitude == 0] = 0
    result[magnitude == 1] = 126 << 23
    return (result | (sign.to(torch.int32) << 28)).view(torch.float32)


def blockwise(values: Tensor, scale: Tensor) -> Tensor:
    """Multiply blocks of K by their scales ``[E, N, G]``."""
    return (values.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2)


def exp2_scale(bits: Tensor, bias: int = 127) -> Tensor:
    return torch.exp2(bits.float() - bias)


def mx_exp2(codes: Tensor, scale: Tensor) -> Tensor:
    return blockwise(lut_codes(codes), exp2_scale(scale).to(torch.bfloat16))


def mx_ldexp(codes: Tensor, scale: Tensor) -> Tensor:
    exponent = scale.to(torch.int32)[..., None] - 127
    return torch.ldexp(lut_codes(codes).unflatten(-1, (scale.shape[-1], -1)), exponent).flatten(-2)


def mx_view(codes: Tensor, scale: Tensor) -> Tensor:
    return blockwise(lut_codes(codes), scale.view(torch.float8_e8m0fnu).to(torch.bfloat16))


def mx_shift(codes: Tensor, scale: Tensor) -> Tensor:
    return blockwise(slice_assigned_codes(codes), (scale.to(torch.int16) << 7).view(torch.bfloat16))


def mx_bits(codes: Tensor, scale: Tensor) -> Tensor:
    return blockwise(bit_codes(codes), exp2_scale(scale)).to(torch.bfloat16)


def mx_masked(codes: Tensor, scale: Tensor) -> Tensor:
    return blockwise(masked_codes(codes), exp2_scale(scale)).to(torch.bfloat16)


def mx_float16(codes: Tensor, scale: Tensor) -> Tensor:
    return blockwise(lut_codes(codes, torch.float16), exp2_scale(scale).to(torch.float16))


def mx_transposed(codes: Tensor, scale: Tensor) -> Tensor:
    return mx_exp2(codes, scale).mT.contiguous()


def mx_rank4(codes: Tensor, scale: Tensor) -> Tensor:
    """transformers' gpt-oss decode of blocks ``[E, N, G, 16]``, rows flattened, output ``[E, K, N]``."""
    table = torch.tensor(LUT, dtype=torch.bfloat16)
    *prefix, groups, half = codes.shape
    rows = codes.reshape(-1, half)
    exponent = (scale.to(torch.int32) - 127).reshape(-1, 1)
    out = torch.empty(rows.shape[0], 2 * half, dtype=torch.bfloat16)
    out[:, 0::2] = table[(rows & 15).to(torch.long)]
    out[:, 1::2] = table[(rows >> 4).to(torch.long)]
    return torch.ldexp(out, exponent).reshape(*prefix, groups * half * 2).transpose(1, 2).contiguous()


def nv(codes: Tensor, scale: Tensor, gs: Tensor) -> Tensor:
    return blockwise(lut_codes(codes, torch.float32), scale.float() * gs[:, None, None]).to(torch.bfloat16)


def nv_global_last(codes: Tensor, scale: Tensor, gs: Tensor) -> Tensor:
    return (blockwise(bit_codes(codes), scale.float()) * gs.reshape(-1, 1, 1)).to(torch.bfloat16)


def nv_bfloat16(codes: Tensor, scale: Tensor, gs: Tensor) -> Tensor:
    factor = scale.to(torch.bfloat16) * gs.to(torch.bfloat16)[:, None, None]
    return blockwise(lut_codes(codes), factor)


def nv_float32(codes: Tensor, scale: Tensor, gs: Tensor) -> Tensor:
    return blockwise(lut_codes(codes, torch.float32), scale.float() * gs[:, None, None])


def nv_scalar(codes: Tensor, scale: Tensor, gs: Tensor) -> Tensor:
    return blockwise(lut_codes(codes, torch.float32), scale.float() * gs).to(torch.bfloat16)


def nv_rows(codes: Tensor, scale: Tensor, gs: Tensor) -> Tensor:
    return blockwise(lut_codes(codes, torch.float32), scale.float() * gs[..., None]).to(torch.bfloat16)


def nv_byte_scale(codes: Tensor, scale: Tensor, gs: Tensor) -> Tensor:
    return nv(codes, scale.view(torch.float8_e4m3fn), gs)


def nv_no_global(codes: Tensor, scale: Tensor) -> Tensor:
    return blockwise(lut_codes(codes), scale.to(torch.bfloat16))


BYTES, E4M3 = torch.uint8, torch.float8_e4m3fn


def roots(fmt: str, *, global_shape: tuple[int, ...] | None = None, scale_dtype: torch.dtype | None = None,
          block: int | None = None, codes_dtype: torch.dtype = BYTES, rank4: bool = False) -> list[Tensor]:  # fmt: skip
    block = block or (32 if fmt == "mx" else 16)
    codes = torch.randint(0, 256, (E, N, K // 2), dtype=torch.uint8).view(codes_dtype)
    scale = torch.randint(110, 126, (E, N, K // block), dtype=torch.uint8)
    scale = scale.view(scale_dtype or (BYTES if fmt == "mx" else E4M3))
    made = [codes.reshape(E, N, -1, 16) if rank4 else codes, scale]
    return made if global_shape is None else [*made, torch.rand(global_shape) + 0.5]


def traced(fn: Callable[..., Tensor], inputs: list[Tensor]) -> fx.Node:
    """The weight node in a graph of plain ATen, as make_fx leaves it."""
    graph = make_fx(torch.func.functionalize(fn, remove="mutations_and_views"), tracing_mode="fake")(*inputs)
    (result,) = next(iter(reversed(graph.graph.nodes))).args
    assert isinstance(result, fx.Node)
    return result


class Holder(nn.Module):
    """Multiplies by a dequantised weight, so that compilation has a GEMM to feed."""

    def __init__(self, fn: Callable[..., Tensor], inputs: list[Tensor]) -> None:
        super().__init__()
        self.fn = fn
        for name, value in zip(("codes", "scale", "gs"), inputs, strict=False):
            self.register_buffer(name, value)
        self.count = len(inputs)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.fn(*(getattr(self, name) for name in ("codes", "scale", "gs")[: self.count]))
        return torch.bmm(x, weight.mT if weight.shape[-1] == K else weight)


def gemm_weight(graph: fx.GraphModule) -> fx.Node:
    (gemm,) = (node for node in graph.graph.nodes if node.target is torch.ops.aten.bmm.default)
    return gemm.args[1]


def decode(codes: Tensor, scale: Tensor, global_scale: Tensor | None, fmt: BlockFormat) -> Tensor:
    """Canonical operands to ``float64 [E, N, K]``, by a table."""
    table = torch.tensor(LUT, dtype=torch.float64)
    values = torch.stack((table[(codes % 16).long()], table[(codes // 16).long()]), dim=-1).flatten(-2)
    scale = 2.0 ** (scale.double() - 127) if fmt.scale_encoding == "e8m0" else scale.view(E4M3).double()
    factor = 1.0 if global_scale is None else global_scale.double().unsqueeze(-1)
    return (values.unflatten(-1, (scale.shape[-1], -1)) * scale.unsqueeze(-1)).flatten(-2) * factor


def canonical(packed: PackedWeight, values: Mapping[fx.Node, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """The canonical operands that a packed weight stands for, from values of a graph's inputs."""

    def made(source: Source) -> Tensor:
        if isinstance(source, Assembled):
            return source.function(*(values[part] for part in source.parts))
        return values[source]

    experts, rows, _ = packed.shape
    codes = made(packed.codes).view(torch.uint8).reshape(experts, rows, -1)
    scale = made(packed.scale).view(packed.format.scale_dtype).reshape(experts, rows, -1)
    if packed.global_scale is None:
        return codes, scale, None
    factor = made(packed.global_scale).float()
    return codes, scale, factor.reshape(experts, rows) if factor.numel() == experts * rows else factor.reshape(-1, 1)


def assert_decodes(
    node: fx.Node,
    fn: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    *,
    values: Mapping[fx.Node, Tensor] | None = None,
    transposed: bool = False,
) -> PackedWeight:
    """Recognise ``node`` and hold what was recognised to ``fn(*inputs)``, weight by weight.

    Args:
        values: of the graph's inputs; by default ``inputs`` are all of them.
        transposed: ``node`` may be the transpose of what ``fn`` gives.
    """
    packed, k_first = identify(node)
    want = fn(*inputs)
    if want.shape != packed.shape or (k_first and not transposed):
        want = want.mT
    if values is None:
        values = dict(zip(node.graph.find_nodes(op="placeholder"), inputs, strict=True))
    got = decode(*canonical(packed, values), packed.format)
    assert got.shape == packed.shape == want.shape
    if packed.global_scale is None:
        assert torch.equal(got.to(want.dtype), want)
    else:
        error = (got - want.double()).abs() / got.abs().clamp_min(1e-30)
        assert float(error.max()) <= {torch.bfloat16: 8e-3, torch.float16: 2e-3}.get(want.dtype, 1e-6)
    return packed


def swizzled(scale: Tensor) -> Tensor:
    """Scales ``[N, G]`` padded to multiples of 128 and 4, in blocks of 128 x 4 of which 32 rows interleave."""
    rows, groups = scale.shape
    scale = torch.nn.functional.pad(scale.view(torch.uint8), (0, -groups % 4, 0, -rows % 128))
    blocks = scale.reshape(scale.shape[0] // 128, 4, 32, scale.shape[1] // 4, 4)
    return blocks.permute(0, 3, 2, 1, 4).contiguous().flatten()


def unswizzled(stored: Tensor, rows: int, groups: int) -> Tensor:
    """``swizzled`` undone."""
    high, wide = -(-rows // 128), -(-groups // 4)
    blocks = stored.reshape(high, wide, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return blocks.reshape(high * 128, wide * 4)[:rows, :groups]
