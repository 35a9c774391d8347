"""Prepared weights of the CuTe-DSL backends lead back to the operands that they come from, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import SWIGLU, MoECase
from test_flashinfer_cute import MODES, RELU2, case, device

from fp4_inductor.layouts.gate_up import UP_GATE, RowOrder, reorder_gate_up, row_order
from fp4_inductor.layouts.kernel_rows import BLOCKS_OF_64
from fp4_inductor.layouts.padding import fit_columns, fit_gate_up, fit_rows
from fp4_inductor.layouts.scale_128x4 import from_scale_tiles
from fp4_inductor.plan import KernelPlan, PlanArg, Prepared, prepare
from fp4_inductor.spec import GateUpOrder, Operand

W13, W13_SCALE, W2, W2_SCALE = (Operand.W13, Operand.W13_SCALE, Operand.W2, Operand.W2_SCALE)


def prepared_for(plan: KernelPlan, operand: Operand) -> Prepared:
    """The argument in the operand's place: the schema has weights and their scales behind hidden states and routing."""
    place = {W13: 3, W13_SCALE: 4, W2: 7, W2_SCALE: 8}[operand]
    found: PlanArg = plan.args[place]
    assert isinstance(found, Prepared)
    return found


def restored(made: MoECase, operand: Operand, tensor: torch.Tensor, order: RowOrder) -> torch.Tensor:
    """The operand's bits [E, N, C] from what was prepared of it."""
    spec = made.spec
    hidden, inner, gated = spec.hidden_size, spec.intermediate_size, spec.activation.gated
    bits = tensor.view(torch.uint8)
    per_column = spec.weight_format.block_size if operand in (W13_SCALE, W2_SCALE) else 2
    columns = (hidden if operand in (W13, W13_SCALE) else inner) // per_column
    if operand in (W13_SCALE, W2_SCALE):
        bits = from_scale_tiles(bits, *bits.shape[1:])
    if operand in (W2, W2_SCALE):
        return fit_columns(fit_rows(bits, hidden), columns)
    if gated:
        halves = fit_gate_up(reorder_gate_up(bits, order, UP_GATE), UP_GATE, inner)
        bits = reorder_gate_up(halves, UP_GATE, row_order(spec.w13_order))
    return fit_columns(bits if gated else fit_rows(bits, inner), columns)


@pytest.mark.parametrize("mode", [*MODES, "masked"])
@settings(deadline=None, max_examples=25)
@given(
    hidden=st.integers(1, 12),
    inner=st.integers(1, 10),
    experts=st.integers(2, 5),
    order=st.sampled_from(GateUpOrder),
    gated=st.booleans(),
)
def test_weights_lead_back(mode: str, hidden: int, inner: int, experts: int, order: GateUpOrder, gated: bool) -> None:
    base = "cutedsl-nvfp4" if mode == "masked" else mode
    made = case(
        base,
        hidden_size=32 * hidden,
        intermediate_size=32 * inner,
        num_experts=experts,
        activation=SWIGLU if gated else RELU2,
        w13_order=order,
        bias=mode == "masked",
        num_tokens=1,
    )
    backend, arch, *_ = MODES[base]
    plan = backend.plan(made.spec, device(arch))
    ready = prepare(plan, made.operands)
    rows = BLOCKS_OF_64 if mode.startswith("cutedsl") else UP_GATE
    for operand in (W13, W13_SCALE, W2, W2_SCALE):
        tensor = ready[prepared_for(plan, operand).name]
        assert tensor.is_contiguous()
        back = restored(made, operand, tensor, rows)
        assert torch.equal(back, made.operands[operand].view(torch.uint8)), operand
