"""Gate and up projections that stand apart: w1 and w3 are read as the two halves of one w13."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from capture import capture
from moe_graphs import random_inputs
from torch import nn

from fp4_inductor import DeviceInfo, Options
from fp4_inductor.backends import get_backend
from fp4_inductor.fold import fold
from fp4_inductor.formats import MXFP4, NVFP4, BlockFormat
from fp4_inductor.lowering_pass import lower
from fp4_inductor.matching import Assembled, find_matches, nodes_of
from fp4_inductor.plan import prepare
from fp4_inductor.quant import dequantize
from fp4_inductor.spec import GateUpOrder, Operand

E, K, H, INNER, TOKENS = 8, 2, 128, 96, 18
TOLERANCE = 1.5e-2
Tensor = torch.Tensor


class SeparateMoE(nn.Module):
    """Experts with ``w1`` (gate), ``w3`` (up) and ``w2`` (down), each packed with a global scale of its own."""

    def __init__(self, fmt: BlockFormat, form: str, *, bias: bool = False, up_first: bool = False) -> None:
        super().__init__()
        self.fmt, self.form, self.up_first = fmt, form, up_first
        self.gate = nn.Linear(H, E, bias=False, dtype=torch.bfloat16)
        for name, rows, columns in (("w1", INNER, H), ("w3", INNER, H), ("w2", H, INNER)):
            self.register_buffer(name, torch.randint(0, 256, (E, rows, columns // 2), dtype=torch.uint8))
            low = 121 if fmt is MXFP4 else 40
            scale = torch.randint(low, low + 4, (E, rows, columns // fmt.block_size), dtype=torch.uint8)
            self.register_buffer(f"{name}_scale", scale.view(fmt.scale_dtype))
            factor = torch.rand(E, 1) * 0.05 + 0.02 if fmt.has_global_scale else None
            self.register_buffer(f"{name}_global", factor)
            self.register_buffer(f"{name}_bias", torch.randn(E, rows).bfloat16() if bias else None)

    def weight(self, name: str) -> Tensor:
        """``[E, N, K]``"""
        parts = (getattr(self, name), getattr(self, f"{name}_scale"), getattr(self, f"{name}_global"))
        return dequantize(*parts, self.fmt, torch.bfloat16)

    def apply(self, name: str, rows: Tensor, experts: Tensor, offs: Tensor | None) -> Tensor:  # type: ignore[override]
        if offs is not None:
            out = F.grouped_mm(rows, self.weight(name).mT, offs=offs)
        else:
            out = torch.bmm(self.weight(name)[experts], rows[..., None])[..., 0]
        bias = getattr(self, f"{name}_bias")
        return out if bias is None else out + bias[experts]

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.softmax(self.gate(x).float(), dim=-1).topk(K, dim=-1)
        experts, offs = ids.flatten(), None
        perm = torch.arange(experts.shape[0], device=x.device)
        if self.form == "grouped_mm":
            experts, perm = experts.sort()
            offs = torch.histc(experts.float(), E, 0, E - 1).cumsum(0).to(torch.int32)
        rows = x[perm // K]
        first, second = ("w3", "w1") if self.up_first else ("w1", "w3")
        one, two = self.apply(first, rows, experts, offs), self.apply(second, rows, experts, offs)
        gate, up = (two, one) if self.up_first else (one, two)
        out = self.apply("w2", F.silu(gate) * up, experts, offs)
        out = out * weights.flatten()[perm, None]
        return torch.zeros_like(x).index_add(0, perm // K, out.to(x.dtype))


def want(model: SeparateMoE, x: Tensor) -> Tensor:
    """The block in float64, token by token."""
    weights, ids = torch.softmax(model.gate(x).float(), dim=-1).topk(K, dim=-1)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, slot in ((t, s) for t in range(x.shape[0]) for s in range(K)):
        expert = int(ids[token, slot])

        def project(name: str, row: Tensor, expert: int = expert) -> Tensor:
            bias = getattr(model, f"{name}_bias")
            product = model.weight(name)[expert].double() @ row
            return product if bias is None else product + bias[expert].double()

        row = x[token].double()
        inner = F.silu(project("w1", row)) * project("w3", row)
        out[token] += weights[token, slot].double() * project("w2", inner)
    return out


def worst_token(got: Tensor, expected: Tensor) -> float:
    return float(((got.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)
def test_two_projections_are_one_w13(fmt: BlockFormat, form: str, dynamic: bool) -> None:
    model = SeparateMoE(fmt, form)
    gm = capture(model, torch.randn(TOKENS, H).bfloat16(), dynamic=dynamic)
    found = find_matches(gm.graph)
    assert [miss.reason for miss in found.near_misses] == []
    (match,) = found.matches
    assert match.pattern == form
    assert (match.spec.w13_rows, match.spec.w13_order) == (2 * INNER, GateUpOrder.GATE_UP)
    w13 = match.operands[Operand.W13]
    assert isinstance(w13, Assembled)
    assert len(w13.parts) == 2


@pytest.mark.parametrize("up_first", [False, True], ids=["gate first", "up first"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)
def test_compiled_numbers(fmt: BlockFormat, form: str, bias: bool, up_first: bool) -> None:
    torch.manual_seed(1)
    model = SeparateMoE(fmt, form, bias=bias, up_first=up_first).eval().requires_grad_(False)
    options = {"fp4moe.expect_matches": 1, "fp4moe.strict": True}
    compiled = torch.compile(model, backend="fp4moe", options=options, fullgraph=True)
    with torch.no_grad():
        for seed in range(2):
            torch.manual_seed(seed)
            x = torch.randn(TOKENS, H).bfloat16()
            assert worst_token(compiled(x), want(model, x)) < TOLERANCE
        model.w3.copy_(torch.randint(0, 256, model.w3.shape, dtype=torch.uint8))
        assert worst_token(compiled(x), want(model, x)) < TOLERANCE


@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)
def test_what_a_gpu_kernel_reads_is_made_at_once(fmt: BlockFormat) -> None:
    """Joining gate and up is a part of the re-layout that reads them, not one of its own."""
    torch.manual_seed(1)
    gm = capture(SeparateMoE(fmt, "grouped_mm"), torch.randn(TOKENS, H).bfloat16())
    (match,) = find_matches(gm.graph).matches
    weights = random_inputs(gm)
    known = dict(zip(gm.graph.find_nodes(op="placeholder"), weights, strict=True))
    operands = {}
    for operand in (
        Operand.W13,
        Operand.W13_SCALE,
        Operand.W13_GLOBAL,
        Operand.W2,
        Operand.W2_SCALE,
        Operand.W2_GLOBAL,
    ):
        source = match.operands.get(operand)
        if source is not None:
            parts = [known[node] for node in nodes_of(source)]
            operands[operand] = source.function(*parts) if isinstance(source, Assembled) else parts[0]
    device = DeviceInfo.parse("sm_90")
    ready = prepare(get_backend("triton_w4a16").plan(match.spec, device), operands)
    lower(gm.graph, Options(backend="triton_w4a16"), device)
    folding = fold(gm, weights, range(len(weights)))
    assert sorted(recipe.name for recipe in folding.recipes) == sorted(ready)
    for recipe in folding.recipes:
        got = recipe.function(*(weights[place] for place in recipe.sources))
        assert torch.equal(got, ready[recipe.name]), recipe.name


def other_rows(model: SeparateMoE, name: str, rows: Tensor) -> Tensor:
    return rows.flip(0) if name == "w3" else rows


def halved(model: SeparateMoE, name: str, rows: Tensor) -> Tensor:
    return rows * 0.5 if name == "w3" else rows


@pytest.mark.parametrize("change", [other_rows, halved])
@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
def test_projections_of_other_rows_are_refused(form: str, change: object) -> None:
    class Changed(SeparateMoE):
        def apply(self, name: str, rows: Tensor, experts: Tensor, offs: Tensor | None) -> Tensor:  # type: ignore[override]
            return super().apply(name, change(self, name, rows), experts, offs)  # type: ignore[operator]

    found = find_matches(capture(Changed(MXFP4, form), torch.randn(TOKENS, H).bfloat16()).graph)
    assert found.matches == ()
    assert len(found.near_misses) == 3
    assert all(miss.reason and miss.progress >= 0.3 for miss in found.near_misses)
