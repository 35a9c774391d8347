"""Spellings of FP4 dequantisation that must be recognised, and near twins that must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    bit_codes,
    blockwise,
    exp2_scale,
    gemm_weight,
    lut_codes,
    mx_bits,
    mx_exp2,
    mx_float16,
    mx_ldexp,
    mx_masked,
    mx_rank4,
    mx_shift,
    mx_transposed,
    mx_view,
    name_of,
    nv,
    nv_bfloat16,
    nv_byte_scale,
    nv_float32,
    nv_global_last,
    nv_no_global,
    nv_rows,
    nv_scalar,
    roots,
    traced,
)
from fp4_inductor.patterns import decoding
from fp4_inductor.patterns import dequantize as pattern
from fp4_inductor.patterns.signature import Memo

from fp4_inductor.formats import MXFP4, NVFP4, BlockFormat
from fp4_inductor.matching import NoMatch, nodes_of
from fp4_inductor.quant import dequantize

MX = [mx_exp2, mx_ldexp, mx_view, mx_shift, mx_bits, mx_masked, mx_float16]


@pytest.mark.parametrize("fn", MX, ids=name_of)
def test_mxfp4_spellings(fn: Callable[..., Tensor]) -> None:
    inputs = roots("mx")
    packed, transposed = pattern.identify(traced(fn, inputs))
    assert packed.format == MXFP4
    assert packed.shape == (E, N, K)
    assert not transposed
    assert packed.global_scale is None
    assert (packed.codes.name, packed.scale.name) == ("codes_1", "scale_1")


@pytest.mark.parametrize(
    ("fn", "global_shape"),
    [(nv, (E,)), (nv_global_last, (E,)), (nv_bfloat16, (E,)), (nv_float32, (E,)), (nv_scalar, ()), (nv_scalar, (1,)),
     (nv_scalar, (E, 1, 1)), (nv_rows, (E, N)), (nv_rows, (1, N)), (nv_rows, (E, 1))],
)  # fmt: skip
def test_nvfp4_spellings(fn: Callable[..., Tensor], global_shape: tuple[int, ...]) -> None:
    packed, transposed = pattern.identify(traced(fn, roots("nv", global_shape=global_shape)))
    assert packed.format == NVFP4
    assert packed.shape == (E, N, K)
    assert not transposed
    assert packed.global_scale is not None
    assert [node.name for node in nodes_of(packed.global_scale)] == ["gs_1"]


def test_transposed_weight() -> None:
    packed, transposed = pattern.identify(traced(mx_transposed, roots("mx")))
    assert transposed
    assert packed.shape == (E, N, K)


def test_square_weight_is_told_from_its_transpose() -> None:
    codes = torch.randint(0, 256, (E, 64, 32), dtype=torch.uint8)
    scale = torch.randint(110, 126, (E, 64, 2), dtype=torch.uint8)
    assert pattern.identify(traced(mx_exp2, [codes, scale]))[1] is False
    assert pattern.identify(traced(mx_transposed, [codes, scale]))[1] is True


def test_blocks_of_rank_four() -> None:
    packed, transposed = pattern.identify(traced(mx_rank4, roots("mx", rank4=True)))
    assert (packed.format, packed.shape, transposed) == (MXFP4, (E, N, K), True)


def test_signed_code_bytes() -> None:
    def decode(codes: Tensor, scale: Tensor) -> Tensor:
        return mx_exp2(codes.view(torch.uint8), scale)

    assert pattern.identify_packed_weight(traced(decode, roots("mx", codes_dtype=torch.int8))).format == MXFP4


def test_scale_dtype_and_encoding_are_two_things() -> None:
    packed = pattern.identify_packed_weight(
        traced(nv_byte_scale, roots("nv", global_shape=(E,), scale_dtype=torch.uint8))
    )
    assert packed.format == NVFP4

    def e8m0_typed(codes: Tensor, scale: Tensor) -> Tensor:
        return blockwise(lut_codes(codes), scale.to(torch.bfloat16))

    assert pattern.identify_packed_weight(
        traced(e8m0_typed, roots("mx", scale_dtype=torch.float8_e8m0fnu))
    ).format == MXFP4  # fmt: skip


def test_variants_bear_other_names() -> None:
    wide = pattern.identify_packed_weight(traced(nv, roots("nv", global_shape=(E,), block=32))).format
    assert (wide.name, wide.block_size) == ("nvfp4_b32", 32)
    plain = pattern.identify_packed_weight(traced(nv_no_global, roots("nv"))).format
    assert (plain.name, plain.has_global_scale) == ("nvfp4_no_global", False)


@pytest.mark.parametrize("level", ["inner", "post_grad"])
@pytest.mark.parametrize(
    ("fn", "fmt", "options"),
    [(mx_exp2, MXFP4, {}), (mx_rank4, MXFP4, {"rank4": True}), (nv, NVFP4, {"global_shape": (E,)}),
     (mx_masked, MXFP4, {})],
)  # fmt: skip
def test_compiled_graphs(level: Level, fn: Callable[..., Tensor], fmt: Any, options: dict[str, Any]) -> None:
    inputs = roots("nv" if fmt is NVFP4 else "mx", **options)
    model = Holder(fn, inputs)
    graph = capture(model, torch.randn(E, 3, K, dtype=torch.bfloat16), level=level)
    packed, transposed = pattern.identify(gemm_weight(graph))
    assert packed.format == fmt
    assert packed.shape == (E, N, K)
    assert transposed  # bmm reads [E, K, N]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)
@pytest.mark.parametrize("level", ["inner", "post_grad"])
def test_the_package_recognises_its_own(fmt: BlockFormat, dtype: torch.dtype, level: Level) -> None:
    def decode(codes: Tensor, scale: Tensor, gs: Tensor | None = None) -> Tensor:
        return dequantize(codes, scale, gs, fmt, dtype).transpose(1, 2)

    inputs = roots("nv", global_shape=(E, 1)) if fmt.has_global_scale else roots("mx")
    graph = capture(Holder(decode, inputs), torch.randn(E, 3, K, dtype=dtype), level=level)
    packed, transposed = pattern.identify(gemm_weight(graph))
    assert (packed.format, packed.shape, transposed) == (fmt, (E, N, K), True)
    shapes = {tuple(node.meta["val"].shape) for node in (packed.codes, packed.scale, packed.global_scale) if node}
    assert shapes == {tuple(value.shape) for value in inputs}


# --- twins that must be refused


def bias_128(codes: Tensor, scale: Tensor) -> Tensor:
    return blockwise(lut_codes(codes), exp2_scale(scale, 128).to(torch.bfloat16))


def rolled_block(codes: Tensor, scale: Tensor) -> Tensor:
    return blockwise(lut_codes(codes), exp2_scale(scale).roll(1, -1).to(torch.bfloat16))


def rolled_rows(codes: Tensor, scale: Tensor) -> Tensor:
    return blockwise(lut_codes(codes), exp2_scale(scale).roll(24, 1).to(torch.bfloat16))


def flipped_experts(codes: Tensor, scale: Tensor) -> Tensor:
    return blockwise(lut_codes(codes), exp2_scale(scale).flip(0).to(torch.bfloat16))


def strided_blocks(codes: Tensor, scale: Tensor) -> Tensor:
    return lut_codes(codes) * exp2_scale(scale).to(torch.bfloat16).repeat(1, 1, K // scale.shape[-1])


def transposed_scale(codes: Tensor, scale: Tensor) -> Tensor:
    groups = scale.shape[-1]
    return blockwise(lut_codes(codes), exp2_scale(scale).reshape(E, groups, -1).mT.to(torch.bfloat16))


def clamped_scale(codes: Tensor, scale: Tensor) -> Tensor:
    return blockwise(lut_codes(codes), exp2_scale(scale.clamp_max(200)).to(torch.bfloat16))


def lowest_scale_skipped(codes: Tensor, scale: Tensor) -> Tensor:
    return blockwise(lut_codes(codes), torch.where(scale == 7, 0.0, exp2_scale(scale)).to(torch.bfloat16))


def wrong_table(codes: Tensor, scale: Tensor) -> Tensor:
    values = lut_codes(codes)
    return blockwise(torch.where(values == 6, 5.0, values), exp2_scale(scale).to(torch.bfloat16))


def int4_codes(codes: Tensor, scale: Tensor) -> Tensor:
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    return blockwise(nibbles.to(torch.bfloat16) - 8, exp2_scale(scale).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("fn", "reason"),
    [(bias_128, "halved"), (rolled_block, "differs"), (rolled_rows, "differs"),
     (flipped_experts, "differs"), (strided_blocks, "differs"), (transposed_scale, "differs"),
     (clamped_scale, "differs"), (lowest_scale_skipped, "differs"), (wrong_table, "differs"),
     (int4_codes, "differs")],
    ids=name_of,
)  # fmt: skip
def test_mxfp4_twins_are_refused(fn: Callable[..., Tensor], reason: str) -> None:
    with pytest.raises(NoMatch, match=reason):
        pattern.identify(traced(fn, roots("mx")))


def table_by_expert(codes: Tensor, scale: Tensor) -> Tensor:
    """Right for the first two experts, which is all that a small probe sees."""
    table = torch.tensor([LUT, LUT, LUT[::-1], LUT[::-1], LUT[::-1]], dtype=torch.bfloat16)
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    return blockwise(table.gather(1, nibbles.long()).reshape(E, N, K), exp2_scale(scale).to(torch.bfloat16))


def test_experts_that_differ_are_refused() -> None:
    with pytest.raises(NoMatch, match="differs"):
        pattern.identify(traced(table_by_expert, roots("mx")))


def global_twice(codes: Tensor, scale: Tensor, gs: Tensor) -> Tensor:
    return nv(codes, scale, gs) * gs[:, None, None]


def global_of_the_next_expert_too(codes: Tensor, scale: Tensor, gs: Tensor) -> Tensor:
    return nv(codes, scale, gs) * gs.roll(1)[:, None, None]


def experts_reversed(codes: Tensor, scale: Tensor, gs: Tensor) -> Tensor:
    return nv(codes, scale, gs).flip(0)


def global_added(codes: Tensor, scale: Tensor, gs: Tensor) -> Tensor:
    return nv_no_global(codes, scale) + gs[:, None, None]


def global_by_block(codes: Tensor, scale: Tensor, gs: Tensor) -> Tensor:
    return blockwise(lut_codes(codes, torch.float32), scale.float() * torch.cat((gs, gs))[: scale.shape[-1]])


def scale_without_sign(codes: Tensor, scale: Tensor, gs: Tensor) -> Tensor:
    return nv(codes, (scale.view(torch.uint8) & 127).view(E4M3), gs)


@pytest.mark.parametrize(
    ("fn", "reason"),
    [(global_twice, "differs"), (global_of_the_next_expert_too, "differs"), (experts_reversed, "differs"),
     (global_added, "differs"), (global_by_block, "differs"), (scale_without_sign, "differs")],
    ids=name_of,
)  # fmt: skip
def test_nvfp4_twins_are_refused(fn: Callable[..., Tensor], reason: str) -> None:
    with pytest.raises(NoMatch, match=reason):
        pattern.identify(traced(fn, roots("nv", global_shape=(E,))))


def test_activations_and_plain_weights_are_no_packed_weight() -> None:
    with pytest.raises(NoMatch, match="byte tensors"):
        pattern.identify(traced(lambda x: x * 2, [torch.randn(E, N, K)]))


def test_random_operations_are_refused() -> None:
    def decode(codes: Tensor, scale: Tensor) -> Tensor:
        return mx_bits(codes, scale) + torch.rand(E, N, K).to(torch.bfloat16)

    with pytest.raises(NoMatch, match="random"):
        pattern.identify(traced(decode, roots("mx")))


def test_equal_weights_are_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    evaluate = decoding.evaluate
    monkeypatch.setattr(decoding, "evaluate", lambda *a, **k: calls.append(1) or evaluate(*a, **k))
    memo = Memo()
    first = pattern.identify(traced(mx_exp2, roots("mx")), memo)
    count = len(calls)
    second = pattern.identify(traced(mx_exp2, roots("mx")), memo)
    assert len(calls) == count > 0
    assert first[0].codes is not second[0].codes
    with pytest.raises(NoMatch):
        pattern.identify(traced(bias_128, roots("mx")), memo)
    with pytest.raises(NoMatch):
        pattern.identify(traced(bias_128, roots("mx")), memo)


def test_large_weights_are_probed_small() -> None:
    """What 128 experts of 1536 x 2048 compute, without 400 million weights."""
    with torch._subclasses.FakeTensorMode():
        codes = torch.empty(128, 1536, 1024, dtype=torch.uint8)
        scale = torch.empty(128, 1536, 64, dtype=torch.uint8)
        global_scale = torch.empty(128, 1, 1)

    def decode(codes: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
        rows = blockwise(bit_codes(codes.reshape(-1, 1024)), exp2_scale(scale).reshape(-1, 64))
        return (rows.reshape(128, 1536, 2048) * global_scale).to(torch.bfloat16).mT.contiguous()

    packed, transposed = pattern.identify(traced(decode, [codes, scale, global_scale]))
    assert (packed.format.name, packed.shape, transposed) == ("mxfp4_global", (128, 1536, 2048), True)
