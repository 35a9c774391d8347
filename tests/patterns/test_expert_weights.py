"""Weights of single experts: picked before the decode or after it, or stored apart; and what joins them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from dequantize_spellings import (
    E4M3,
    E,
    K,
    N,
    Tensor,
    assert_decodes,
    blockwise,
    canonical,
    decode,
    exp2_scale,
    lut_codes,
    mx_bits,
    mx_exp2,
    mx_masked,
    mx_shift,
    mx_transposed,
    name_of,
    nv,
    nv_scalar,
    roots,
)
from fp4_inductor.patterns import decoding
from fp4_inductor.patterns.dequantize import identify, identify_expert
from fp4_inductor.patterns.signature import Memo
from fp4_inductor.patterns.weights import stack_experts
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fp4_inductor.formats import MXFP4, NVFP4
from fp4_inductor.matching import Assembled, NoMatch, PackedWeight, nodes_of

Decode = Callable[..., Tensor]


def outputs(fn: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> list[fx.Node]:
    """The nodes of what ``fn`` returns, in a graph of plain ATen."""
    graph = make_fx(torch.func.functionalize(fn, remove="mutations_and_views"), tracing_mode="fake")(*inputs)
    (results,) = next(iter(reversed(graph.graph.nodes))).args
    return list(results)


def assert_stacks(fn: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> PackedWeight:
    """Every expert that ``fn`` decodes is recognised, and together they are what it decodes."""
    nodes = outputs(fn, inputs)
    memo = Memo()
    experts = [identify_expert(node, memo) for node in nodes]
    packed = stack_experts(experts)
    want = [w.mT if e.transposed else w for w, e in zip(fn(*inputs), experts, strict=True)]
    values = dict(zip(nodes[0].graph.find_nodes(op="placeholder"), inputs, strict=True))
    got = decode(*canonical(packed, values), packed.format)
    assert got.shape == packed.shape
    if packed.global_scale is None:
        assert torch.equal(got.to(want[0].dtype), torch.stack(want))
    else:
        torch.testing.assert_close(got, torch.stack(want).double(), rtol=8e-3, atol=0)
    return packed


def picked_before(one: Decode) -> Callable[..., Sequence[Tensor]]:
    return lambda codes, scale: [one(codes[e], scale[e]) for e in range(E)]


def picked_after(one: Decode) -> Callable[..., Sequence[Tensor]]:
    return lambda codes, scale: [one(codes, scale)[e] for e in range(E)]


@pytest.mark.parametrize("one", [mx_exp2, mx_bits, mx_masked, mx_shift], ids=name_of)
@pytest.mark.parametrize("when", [picked_before, picked_after], ids=name_of)
def test_experts_of_one_tensor_are_that_tensor(one: Decode, when: Callable[[Decode], Decode]) -> None:
    packed = assert_stacks(when(one), roots("mx"))
    assert (packed.format, packed.shape) == (MXFP4, (E, N, K))
    assert not isinstance(packed.codes, Assembled)
    assert not isinstance(packed.scale, Assembled)


def test_the_index_is_told() -> None:
    nodes = outputs(picked_before(mx_exp2), roots("mx"))
    assert [identify_expert(node).index for node in nodes] == list(range(E))
    (own,) = outputs(lambda codes, scale: [mx_exp2(codes, scale)], [root[0] for root in roots("mx")])
    assert identify_expert(own).index is None


def test_transposed_experts() -> None:
    def decode_each(codes: Tensor, scale: Tensor) -> list[Tensor]:
        return [mx_exp2(codes[e], scale[e]).t() for e in range(E)]

    nodes = outputs(decode_each, roots("mx"))
    assert all(identify_expert(node).transposed for node in nodes)
    assert_stacks(decode_each, roots("mx"))
    after = outputs(picked_after(mx_transposed), roots("mx"))
    assert all(identify_expert(node).transposed for node in after)


def values_before(codes: Tensor, scale: Tensor) -> list[Tensor]:
    values = lut_codes(codes)
    return [blockwise(values[e], exp2_scale(scale[e]).bfloat16()) for e in range(E)]


def factors_before_too(codes: Tensor, scale: Tensor) -> list[Tensor]:
    values, factors = lut_codes(codes).unbind(), exp2_scale(scale).bfloat16()
    return [blockwise(values[e], factors[e]).t() for e in range(E)]


def global_scale_last(codes: Tensor, scale: Tensor, gs: Tensor) -> list[Tensor]:
    plain = blockwise(lut_codes(codes, torch.float32), scale.float())
    return [(plain[e] * gs[e]).bfloat16() for e in range(E)]


def test_experts_picked_halfway() -> None:
    for fn in (values_before, factors_before_too):
        packed = assert_stacks(fn, roots("mx"))
        assert not isinstance(packed.codes, Assembled)
        assert not isinstance(packed.scale, Assembled)
    for size in ((E,), (E, N, 1)):
        packed = assert_stacks(global_scale_last, roots("nv", global_shape=size))
        assert not isinstance(packed.codes, Assembled)


def test_halfway_twins_are_refused() -> None:
    def some_exchanged(codes: Tensor, scale: Tensor) -> list[Tensor]:
        values = lut_codes(codes)
        values = torch.cat((values[:2], values[2:].flip(0)))
        return [blockwise(values[e], exp2_scale(scale)[e].bfloat16()) for e in range(E)]

    def of_two_experts(codes: Tensor, scale: Tensor) -> list[Tensor]:
        values = lut_codes(codes)
        return [blockwise(values[e], exp2_scale(scale[(e + 1) % E]).bfloat16()) for e in range(E)]

    for fn in (some_exchanged, of_two_experts):
        memo = Memo()
        for node in outputs(fn, roots("mx")):
            with pytest.raises(NoMatch):
                identify_expert(node, memo)


def halves_of(fmt: str) -> list[Tensor]:
    """Codes, scales and global scales of gate, then of up."""
    sizes = {"global_shape": (E,)} if fmt == "nv" else {}
    return [*roots(fmt, **sizes), *roots(fmt, **sizes)]


def test_gate_and_up_joined_once_decoded() -> None:
    def of_all(*t: Tensor) -> Tensor:
        return torch.cat([nv(*t[:3]), nv(*t[3:])], dim=1)

    def turned(*t: Tensor) -> Tensor:
        return torch.cat([nv(*t[:3]).mT, nv(*t[3:]).mT], dim=2)

    inputs = halves_of("nv")
    for fn in (of_all, turned):
        packed = assert_decodes(outputs(lambda *t, fn=fn: [fn(*t)], inputs)[0], fn, inputs)
        assert packed.shape == (E, 2 * N, K)

    def one_by_one(*t: Tensor) -> list[Tensor]:
        return [torch.cat([nv_scalar(*(x[e] for x in t[:3])), nv_scalar(*(x[e] for x in t[3:]))]) for e in range(E)]

    packed = assert_stacks(one_by_one, inputs)
    assert packed.shape == (E, 2 * N, K)
    assert len(nodes_of(packed.codes)) == 2  # each root once


def test_halves_joined_along_k_are_refused() -> None:
    inputs = halves_of("mx")
    (node,) = outputs(lambda *t: [torch.cat([mx_exp2(*t[:2]), mx_exp2(*t[2:])], dim=2)], inputs)
    with pytest.raises(NoMatch, match="another axis than rows"):
        identify(node)


@pytest.mark.parametrize("pick", ["slice", "unbind", "split"])
def test_other_ways_to_pick(pick: str) -> None:
    def decode_each(codes: Tensor, scale: Tensor) -> list[Tensor]:
        if pick == "slice":
            parts = [(codes[e : e + 1], scale[e : e + 1]) for e in range(E)]
        elif pick == "unbind":
            parts = list(zip(codes.unbind(), scale.unbind(), strict=True))
        else:
            parts = list(zip(codes.split(1), scale.split(1), strict=True))
        return [mx_exp2(c, s).reshape(N, K) for c, s in parts]

    packed = assert_stacks(decode_each, roots("mx"))
    assert not isinstance(packed.codes, Assembled)


def test_experts_in_another_order_or_fewer() -> None:
    def decode_some(order: Sequence[int]) -> Decode:
        return lambda codes, scale: [mx_exp2(codes[e], scale[e]) for e in order]

    for order in ([4, 2, 0, 1, 3], [1, 2, 3]):
        packed = assert_stacks(decode_some(order), roots("mx"))
        assert packed.shape == (len(order), N, K)
        assert isinstance(packed.codes, Assembled)


def separate(fmt: str) -> list[Tensor]:
    """Codes and scales of every expert, as tensors of their own."""
    codes, scale = roots(fmt)
    return [*codes.unbind(), *scale.unbind()]


def test_experts_stored_apart_are_stacked() -> None:
    packed = assert_stacks(lambda *t: [mx_exp2(t[e], t[E + e]) for e in range(E)], separate("mx"))
    assert isinstance(packed.codes, Assembled)
    assert len(packed.codes.parts) == E


def nv_one(codes: Tensor, scale: Tensor, gs: Tensor) -> Tensor:
    return nv_scalar(codes, scale, gs)


@pytest.mark.parametrize("sizes", ["expert", "tensor", "row", "column", "apart"])
def test_global_scales_of_experts(sizes: str) -> None:
    codes, scale = roots("nv")
    shape = {"expert": (E,), "tensor": (1,), "row": (E, N), "column": (E, 1), "apart": (E,)}[sizes]
    gs = torch.rand(shape) + 0.5

    def decode_each(*t: Tensor) -> list[Tensor]:
        codes, scale, *gs = t
        of = [gs[0] if sizes == "tensor" else gs[e] if sizes == "apart" else gs[0][e] for e in range(E)]
        if sizes == "row":
            of = [each[:, None] for each in of]
        return [nv_one(codes[e], scale[e], of[e]) for e in range(E)]

    packed = assert_stacks(decode_each, [codes, scale, *(gs.unbind() if sizes == "apart" else [gs])])
    assert packed.format == NVFP4
    assert isinstance(packed.global_scale, Assembled) == (sizes == "apart")


def test_stacks_of_decoded_experts_are_one_weight() -> None:
    def stacked(*t: Tensor) -> Tensor:
        return torch.stack([mx_exp2(t[e], t[E + e]) for e in range(E)])

    def joined(*t: Tensor) -> Tensor:
        return torch.cat([mx_exp2(t[e], t[E + e]).t()[None] for e in range(E)]).to(torch.float32)

    def unbound(codes: Tensor, scale: Tensor) -> Tensor:
        return torch.stack([mx_exp2(c, s) for c, s in zip(codes.unbind(), scale.unbind(), strict=True)]).mT

    for fn, inputs in ((stacked, separate("mx")), (joined, separate("mx")), (unbound, roots("mx"))):
        node = outputs(lambda *t, fn=fn: [fn(*t)], inputs)[0]
        packed = assert_decodes(node, fn, inputs)
        assert (packed.format, packed.shape) == (MXFP4, (E, N, K))
    assert not isinstance(packed.codes, Assembled)


def test_stacked_bytes_are_one_weight() -> None:
    def fn(*t: Tensor) -> Tensor:
        return mx_exp2(torch.stack(t[:E]), torch.stack(t[E:]))

    inputs = separate("mx")
    packed = assert_decodes(outputs(lambda *t: [fn(*t)], inputs)[0], fn, inputs)
    assert isinstance(packed.codes, Assembled)


def test_equal_experts_are_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    evaluate = decoding.evaluate
    monkeypatch.setattr(decoding, "evaluate", lambda *a, **k: calls.append(1) or evaluate(*a, **k))
    memo = Memo()
    nodes = outputs(picked_before(mx_exp2), roots("mx"))
    identify_expert(nodes[0], memo)
    count = len(calls)
    for node in nodes[1:]:
        identify_expert(node, memo)
    assert len(calls) == count > 0


# --- twins that must be refused, or come out as what they are


def test_scales_of_another_expert_are_taken_from_there() -> None:
    packed = assert_stacks(lambda c, s: [mx_exp2(c[e], s[(e + 1) % E]) for e in range(E)], roots("mx"))
    assert isinstance(packed.scale, Assembled)
    assert not isinstance(packed.codes, Assembled)


@pytest.mark.parametrize("expert", range(E))
def test_one_expert_that_decodes_otherwise_is_refused(expert: int) -> None:
    def decode_each(codes: Tensor, scale: Tensor) -> list[Tensor]:
        bias = [128 if e == expert else 127 for e in range(E)]
        return [blockwise(lut_codes(codes[e]), exp2_scale(scale[e], bias[e]).bfloat16()) for e in range(E)]

    memo = Memo()
    for place, node in enumerate(outputs(decode_each, roots("mx"))):
        if place == expert:
            with pytest.raises(NoMatch, match="halved"):
                identify_expert(node, memo)
        else:
            identify_expert(node, memo)


def test_experts_of_two_formats_are_not_stacked() -> None:
    def decode_each(codes: Tensor, scale: Tensor) -> list[Tensor]:
        as_e4m3 = scale[1].view(E4M3).to(torch.bfloat16)
        return [mx_exp2(codes[0], scale[0]), blockwise(lut_codes(codes[1]), as_e4m3)]

    experts = [identify_expert(node) for node in outputs(decode_each, roots("mx"))]
    with pytest.raises(NoMatch, match="packed as"):
        stack_experts(experts)


def test_a_stack_in_which_one_expert_is_plain_is_refused() -> None:
    def stacked(codes: Tensor, scale: Tensor, plain: Tensor) -> Tensor:
        return torch.stack([mx_exp2(codes[0], scale[0]), plain])

    (node,) = outputs(lambda *t: [stacked(*t)], [*roots("mx"), torch.randn(N, K, dtype=torch.bfloat16)])
    with pytest.raises(NoMatch, match="byte tensors"):
        identify_expert(node.all_input_nodes[1])


def test_mixed_experts_are_refused() -> None:
    def mixed(codes: Tensor, scale: Tensor) -> list[Tensor]:
        return [mx_exp2((codes[0] & 15) | (codes[1] & 240), scale[0])]

    (node,) = outputs(mixed, roots("mx"))
    with pytest.raises(NoMatch, match="no shape that its codes could fill"):
        identify_expert(node)
