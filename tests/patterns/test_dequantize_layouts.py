"""FP4 weights that are stored in other ways than kernels read: recognised, and made canonical bit by bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from capture import Level, capture
from dequantize_spellings import (
    E4M3,
    LUT,
    E,
    Holder,
    K,
    N,
    Tensor,
    assert_decodes,
    bit_codes,
    blockwise,
    exp2_scale,
    gemm_weight,
    lut_codes,
    mx_bits,
    mx_exp2,
    mx_ldexp,
    mx_masked,
    mx_view,
    name_of,
    nv,
    nv_no_global,
    nv_rows,
    nv_scalar,
    roots,
    swizzled,
    traced,
    unswizzled,
)
from fp4_inductor.patterns import dequantize as pattern

from fp4_inductor.errors import Fp4InductorError
from fp4_inductor.formats import MXFP4, NVFP4
from fp4_inductor.matching import Assembled, NoMatch

Decode = Callable[..., Tensor]
TABLE = torch.tensor(LUT)


def check(fn: Decode, inputs: Sequence[Tensor]) -> pattern.PackedWeight:
    return assert_decodes(traced(fn, list(inputs)), fn, inputs)


# --- bytes that lie otherwise


def high_nibble_first(codes: Tensor, scale: Tensor) -> Tensor:
    nibbles = torch.stack((codes >> 4, codes & 15), dim=-1)
    return blockwise(torch.tensor(LUT).bfloat16()[nibbles.int()].flatten(-2), exp2_scale(scale).to(torch.bfloat16))


def flipped_experts(codes: Tensor, scale: Tensor) -> Tensor:
    return mx_exp2(codes, scale.flip(0))


def reshaped_scales(codes: Tensor, scale: Tensor) -> Tensor:
    return mx_exp2(codes, scale.reshape(E, scale.shape[-1], -1).mT)


def flat_rows(codes: Tensor, scale: Tensor) -> Tensor:
    return mx_bits(codes.reshape(-1, K // 2), scale.reshape(E * N, -1)).reshape(E, N, K)


@pytest.mark.parametrize("fn", [high_nibble_first, flipped_experts, reshaped_scales, flat_rows], ids=name_of)
def test_moved_bytes(fn: Decode) -> None:
    packed = check(fn, roots("mx"))
    assert (packed.format, packed.shape) == (MXFP4, (E, N, K))


def test_padding_and_joined_halves() -> None:
    codes, scale = roots("mx")
    padded = torch.nn.functional.pad(scale, (0, 1, 0, 16), value=99)
    check(lambda c, s: mx_exp2(c, s[:, :N, :3]), [codes, padded])
    halves = [half.contiguous() for root in (codes, scale) for half in root.chunk(2, dim=1)]
    packed = check(lambda a, b, c, d: mx_exp2(torch.cat((a, b), 1), torch.cat((c, d), 1)), halves)
    assert isinstance(packed.codes, Assembled)
    assert len(packed.codes.parts) == 2


def swizzled_scales(codes: Tensor, scale: Tensor) -> Tensor:
    return mx_exp2(codes, torch.stack([unswizzled(each, N, K // 32) for each in scale]))


def swizzled_together(codes: Tensor, scale: Tensor) -> Tensor:
    return mx_view(codes, unswizzled(scale, E * N, K // 32).reshape(E, N, K // 32))


def test_swizzled_scales() -> None:
    codes, scale = roots("mx")
    packed = check(swizzled_scales, [codes, torch.stack([swizzled(each) for each in scale])])
    assert not isinstance(packed.codes, Assembled)
    check(swizzled_together, [codes, swizzled(scale.flatten(0, 1))])


# --- codes and scales with K before N


def columns(codes: Tensor, scale: Tensor) -> Tensor:
    """Codes ``[E, K/2, N]``, scales ``[E, K/bs, N]``; decoded to ``[E, K, N]``."""
    values = torch.tensor(LUT)[torch.stack((codes & 15, codes >> 4), dim=2).flatten(1, 2).int()]
    return (values.unflatten(1, (scale.shape[1], -1)) * exp2_scale(scale).unsqueeze(2)).flatten(1, 2).bfloat16()


def columns_by_slices(codes: Tensor, scale: Tensor) -> Tensor:
    out = torch.empty(E, K, N, dtype=torch.bfloat16)
    out[:, 0::2] = torch.tensor(LUT, dtype=torch.bfloat16)[(codes & 15).int()]
    out[:, 1::2] = torch.tensor(LUT, dtype=torch.bfloat16)[(codes >> 4).int()]
    return out * exp2_scale(scale).bfloat16().repeat_interleave(K // scale.shape[1], dim=1)


def columns_turned_first(codes: Tensor, scale: Tensor) -> Tensor:
    return mx_exp2(codes.mT, scale.mT).mT


def columns_of_codes_only(codes: Tensor, scale: Tensor) -> Tensor:
    return mx_exp2(codes.mT, scale)


@pytest.mark.parametrize("fn", [columns, columns_by_slices, columns_turned_first], ids=name_of)
@pytest.mark.parametrize("square", [False, True])
def test_packed_along_the_middle_axis(fn: Decode, square: bool) -> None:
    codes, scale = roots("mx")
    if square and fn is not columns_by_slices:
        codes, scale = codes.repeat(1, 2, 1)[:, :K], scale.repeat(1, 2, 1)[:, :K]
        codes = torch.randint_like(codes, 256)
    node = traced(fn, inputs := [codes.mT.contiguous(), scale.mT.contiguous()])
    assert_decodes(node, fn, inputs)
    assert pattern.identify(node)[1]  # [E, K, N]


def test_codes_and_scales_may_lie_unlike() -> None:
    codes, scale = roots("mx")
    packed = check(columns_of_codes_only, [codes.mT.contiguous(), scale])
    assert isinstance(packed.codes, Assembled)
    assert not isinstance(packed.scale, Assembled)


def test_columns_at_the_size_of_a_model() -> None:
    with torch._subclasses.FakeTensorMode():
        codes = torch.empty(128, 1024, 1536, dtype=torch.uint8)
        scale = torch.empty(128, 64, 1536, dtype=torch.uint8)

    def fn(codes: Tensor, scale: Tensor) -> Tensor:
        values = bit_codes(codes.mT).mT
        return (values.unflatten(1, (64, -1)) * exp2_scale(scale).unsqueeze(2)).flatten(1, 2).bfloat16()

    packed, transposed = pattern.identify(traced(fn, [codes, scale]))
    assert (packed.format, packed.shape, transposed) == (MXFP4, (128, 1536, 2048), True)


# --- global scales


def halves(codes: Tensor, scale: Tensor, gs: Tensor) -> Tensor:
    return nv_rows(codes, scale, gs.repeat_interleave(N // 2, dim=-1))


def halves_of_both(codes: Tensor, scale: Tensor, gs: Tensor) -> Tensor:
    values = blockwise(lut_codes(codes, torch.float32), scale.float())
    return (values.unflatten(1, (2, -1)) * gs[..., None, None]).flatten(1, 2).to(torch.bfloat16)


def halves_first(codes: Tensor, scale: Tensor, gs: Tensor) -> Tensor:
    return halves(codes, scale, gs.t())


def interleaved_halves(codes: Tensor, scale: Tensor, gs: Tensor) -> Tensor:
    return nv_rows(codes, scale, gs.repeat(1, N // 2))


def divided(codes: Tensor, scale: Tensor, gs: Tensor) -> Tensor:
    return blockwise(lut_codes(codes, torch.float32), scale.float() / gs[:, None, None]).to(torch.bfloat16)


def inverted(codes: Tensor, scale: Tensor, gs: Tensor) -> Tensor:
    return nv(codes, scale, 1 / gs)


def divided_by_rows(codes: Tensor, scale: Tensor, gs: Tensor) -> Tensor:
    return blockwise(lut_codes(codes, torch.float32), scale.float()) / gs[..., None]


def from_amax(codes: Tensor, scale: Tensor, amax: Tensor) -> Tensor:
    return nv(codes, scale, amax.clamp_min(1e-3) / (448 * 6))


def two_factors(codes: Tensor, scale: Tensor, gs: Tensor, other: Tensor) -> Tensor:
    return nv(codes, scale, gs * other)


def apart(codes: Tensor, scale: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return halves(codes, scale, torch.stack((gate, up), dim=1))


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [(halves, [(E, 2)]), (halves_of_both, [(E, 2)]), (halves_first, [(2, E)]), (interleaved_halves, [(E, 2)]),
     (halves, [(1, 2)]), (divided, [(E,)]), (inverted, [(E,)]), (divided_by_rows, [(E, N)]), (from_amax, [(E,)]),
     (two_factors, [(E,), (E,)]), (apart, [(E,), (E,)]), (nv_rows, [(1, N)]), (nv_scalar, [(1, 1, 1)])],
)  # fmt: skip
def test_global_scales(fn: Decode, shapes: list[tuple[int, ...]]) -> None:
    packed = check(fn, [*roots("nv"), *(torch.rand(shape) + 0.5 for shape in shapes)])
    assert packed.format == NVFP4


def test_global_scale_of_rows_is_told_from_experts() -> None:
    codes = torch.randint(0, 256, (N, N, K // 2), dtype=torch.uint8)
    scale = torch.randint(40, 70, (N, N, K // 16), dtype=torch.uint8).view(E4M3)
    gs = torch.rand(N) + 0.5
    assert not isinstance(check(nv, [codes, scale, gs]).global_scale, Assembled)
    assert isinstance(check(nv_rows, [codes, scale, gs]).global_scale, Assembled)


def test_mxfp4_with_a_global_scale_that_divides() -> None:
    def fn(codes: Tensor, scale: Tensor, gs: Tensor) -> Tensor:
        return mx_bits(codes, scale).float() / gs[:, None, None]

    assert check(fn, [*roots("mx"), torch.rand(E) + 0.5]).format.name == "mxfp4_global"


# --- tables that are no constants


def by_code(codes: Tensor, scale: Tensor, table: Tensor) -> Tensor:
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    return blockwise(table.bfloat16()[nibbles.int()], exp2_scale(scale).bfloat16())


def by_code_gathered(codes: Tensor, scale: Tensor, table: Tensor) -> Tensor:
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten()
    return blockwise(torch.nn.functional.embedding(nibbles.int(), table[:, None]).reshape(E, N, K), exp2_scale(scale))


def by_magnitude(codes: Tensor, scale: Tensor, table: Tensor) -> Tensor:
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    values = table[(nibbles & 7).int()]
    return blockwise(torch.where(nibbles >= 8, -values, values), exp2_scale(scale))


def by_byte(codes: Tensor, scale: Tensor, table: Tensor) -> Tensor:
    return blockwise(table[codes.int()].flatten(-2), exp2_scale(scale))


BYTES = torch.stack((TABLE.repeat(16), TABLE.repeat_interleave(16)), dim=1)
TABLES = [(by_code, TABLE), (by_code_gathered, TABLE), (by_magnitude, TABLE[:8]), (by_byte, BYTES)]


@pytest.mark.parametrize(("fn", "table"), TABLES, ids=name_of)
def test_tables_that_are_inputs(fn: Decode, table: Tensor) -> None:
    packed = check(fn, [*roots("mx"), table])
    assert packed.format == MXFP4
    assert isinstance(packed.codes, Assembled)
    # Whatever e2m1 values it holds, the codes are made through it.
    node = traced(fn, inputs := [*roots("mx"), table[torch.randperm(len(table))]])
    assert_decodes(node, fn, inputs)


@pytest.mark.parametrize(("fn", "table"), TABLES, ids=name_of)
def test_tables_of_other_values_raise_where_they_are_known(fn: Decode, table: Tensor) -> None:
    node = traced(fn, inputs := [*roots("mx"), table * 1.25])
    with pytest.raises(Fp4InductorError, match="needed a table of the e2m1 values"):
        assert_decodes(node, fn, inputs)


def test_table_with_a_global_scale() -> None:
    def fn(codes: Tensor, scale: Tensor, gs: Tensor, table: Tensor) -> Tensor:
        nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
        return blockwise(table[nibbles.int()], scale.float() * gs[:, None, None])

    assert check(fn, [*roots("nv"), torch.rand(E) + 0.5, TABLE]).format == NVFP4


def summed_table(codes: Tensor, scale: Tensor, table: Tensor) -> Tensor:
    return by_code(codes, scale, table) * table.sum()


def shifted_values(codes: Tensor, scale: Tensor, table: Tensor) -> Tensor:
    return by_code(codes, scale, table + codes[0, 0, 0].float() / 512)


@pytest.mark.parametrize("fn", [summed_table, shifted_values], ids=name_of)
def test_tables_that_are_more_than_looked_up_are_refused(fn: Decode) -> None:
    with pytest.raises(NoMatch):
        pattern.identify(traced(fn, [*roots("mx"), TABLE]))


# --- twins that must be refused


def pairs_of_rows(codes: Tensor, scale: Tensor) -> Tensor:
    """Codes ``[E, N/2, K]``: the two nibbles of a byte belong to two rows."""
    values = torch.tensor(LUT)[torch.stack((codes & 15, codes >> 4), dim=2).flatten(1, 2).int()]
    return blockwise(values, exp2_scale(scale)).bfloat16()


def pairs_half_a_row_apart(codes: Tensor, scale: Tensor) -> Tensor:
    values = torch.tensor(LUT)[torch.cat((codes & 15, codes >> 4), dim=-1).int()]
    return blockwise(values, exp2_scale(scale)).bfloat16()


def columns_swapped(codes: Tensor, scale: Tensor) -> Tensor:
    return columns(codes, scale).roll(1, dims=1)


def test_pairs_that_do_not_lie_along_k_are_refused() -> None:
    codes, scale = roots("mx")
    with pytest.raises(NoMatch, match="pairs rows"):
        pattern.identify(traced(pairs_of_rows, [codes.reshape(E, N // 2, K), scale]))
    with pytest.raises(NoMatch, match="differs"):
        pattern.identify(traced(pairs_half_a_row_apart, [codes, scale]))
    with pytest.raises(NoMatch):
        pattern.identify(traced(columns_swapped, [codes.mT.contiguous(), scale.mT.contiguous()]))


def half_swapped(codes: Tensor, scale: Tensor, gs: Tensor) -> Tensor:
    values = nv_no_global(codes, scale).unflatten(1, (2, -1))
    return (values * gs[..., None, None] * gs.flip(-1)[:, :1, None, None]).flatten(1, 2)


def test_global_scales_that_mix_halves_are_refused() -> None:
    with pytest.raises(NoMatch):
        pattern.identify(traced(half_swapped, [*roots("nv"), torch.rand(E, 2) + 0.5]))


# --- as compilers leave them


CAPTURED = [
    (high_nibble_first, "mx", ()), (swizzled_scales, "swizzled", ()), (mx_ldexp, "mx", ()), (mx_masked, "mx", ()),
    (columns, "columns", ()), (columns_by_slices, "columns", ()), (by_code, "mx", (16,)),
    (halves, "nv", (E, 2)), (divided, "nv", (E,)), (inverted, "nv", (E,)),
]  # fmt: skip


@pytest.mark.parametrize(("level", "dynamic"), [("inner", False), ("post_grad", True)])
@pytest.mark.parametrize(("fn", "stored", "factor"), CAPTURED, ids=name_of)
def test_compiled_graphs(fn: Decode, stored: str, factor: tuple[int, ...], level: Level, dynamic: bool) -> None:
    inputs = roots("nv" if stored == "nv" else "mx")
    if stored == "columns":
        inputs = [root.mT.contiguous() for root in inputs]
    elif stored == "swizzled":
        inputs[1] = torch.stack([swizzled(each) for each in inputs[1]])
    if factor:
        inputs.append(TABLE.clone() if factor == (16,) else torch.rand(factor) + 0.5)
    x = torch.randn(E, 3, K, dtype=fn(*inputs).dtype)
    graph = capture(Holder(fn, inputs), x, level=level, dynamic=dynamic)
    assert_decodes(gemm_weight(graph), fn, inputs, values=stored_values(graph, inputs), transposed=True)


def stored_values(graph: torch.fx.GraphModule, stored: Sequence[Tensor]) -> dict[torch.fx.Node, Tensor]:
    """Values of a graph's inputs, told by shape and dtype."""
    inputs = [node for node in graph.graph.find_nodes(op="placeholder") if isinstance(node.meta["val"], Tensor)]
    pairs = [(node, value) for node in inputs for value in stored if node.meta["val"].dtype == value.dtype]
    return {node: value for node, value in pairs if tuple(node.meta["val"].shape) == tuple(value.shape)}


@pytest.mark.parametrize("is_swizzled", [False, True], ids=["rows", "swizzled"])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_torchao_tensors(fmt: str, is_swizzled: bool) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed", exc_type=ImportError)
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    weight = torch.randn(3, 256, 128, dtype=torch.bfloat16)
    if fmt == "nvfp4":
        stored = NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=torch.rand(3, 1, 1), is_swizzled_scales=is_swizzled)
    else:
        stored = MXTensor.to_mx(weight, torch.float4_e2m1fn_x2, 32, is_swizzled_scales=is_swizzled)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(stored, requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.bmm(x, self.weight.dequantize().mT)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = capture(Model(), torch.randn(3, 5, 128, dtype=torch.bfloat16))
    fields = [
        value for name in ("qdata", "scale", "per_tensor_scale") if (value := getattr(stored, name, None)) is not None
    ]
    values = stored_values(graph, fields)
    assert_decodes(gemm_weight(graph), lambda *_: stored.dequantize(), fields, values=values, transposed=True)
