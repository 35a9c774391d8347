"""Emission: whatever shape the graph holds its operands in, the fused op gets them canonical."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from moe_cases import CLAMPED_SWIGLU, MoECase, make_case
from tolerances import assert_close_per_token
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fp4_inductor import DeviceInfo
from fp4_inductor.backends import get_backend
from fp4_inductor.emit import PREPARED, Emitted, emit_plan
from fp4_inductor.formats import MXFP4, NVFP4
from fp4_inductor.matching import Match, SourceLocation
from fp4_inductor.plan import run_plan
from fp4_inductor.spec import GateUpOrder, Operand

View = Callable[[torch.Tensor], torch.Tensor]
CPU = DeviceInfo.parse("cpu")


def emit_into_graph(
    case: MoECase, backend: str, views: dict[Operand, View], output_shape: tuple[int, ...]
) -> tuple[fx.GraphModule, list[torch.Tensor], Emitted]:
    """A graph whose inputs are the case's operands through ``views``, with one block to replace."""
    graph, mode = fx.Graph(), FakeTensorMode()
    nodes: dict[Operand, fx.Node] = {}
    inputs = []
    for operand, tensor in case.operands.items():
        inputs.append(views.get(operand, lambda t: t)(tensor))
        nodes[operand] = graph.placeholder(str(operand))
        nodes[operand].meta["val"] = mode.from_tensor(inputs[-1])
    hidden = nodes[Operand.HIDDEN]
    output = graph.call_function(torch.ops.aten.reshape.default, (hidden, list(output_shape)))
    output.meta["val"] = hidden.meta["val"].reshape(output_shape)
    output.meta["stack_trace"] = '  File "user.py", line 3, in forward\n    return moe(x)\n'
    graph.output((output,))
    where = SourceLocation("user.py", 3, "return moe(x)", "layers.0")
    match = Match("by_hand", "experts", case.spec, output, frozenset([output]), nodes, where)
    chosen = get_backend(backend)
    assert chosen.check(case.spec, CPU).ok
    emitted = emit_plan(graph, match, chosen.plan(case.spec, CPU), chosen.name)
    output.replace_all_uses_with(emitted.result)
    graph.eliminate_dead_code()
    graph.lint()
    return fx.GraphModule({}, graph), inputs, emitted


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)
@pytest.mark.parametrize("order", list(GateUpOrder), ids=str)
def test_canonical_operands(backend: str, fmt: object, order: GateUpOrder) -> None:
    case = make_case(fmt, activation=CLAMPED_SWIGLU, w13_order=order, bias=True, num_tokens=9)  # type: ignore[arg-type]
    module, inputs, _ = emit_into_graph(case, backend, {}, (9, 128))
    (out,) = module(*inputs)
    assert_close_per_token(out, case.reference(), torch.bfloat16)


def test_operands_as_checkpoints_and_models_hold_them() -> None:
    case = make_case(MXFP4, num_tokens=6, w13_order=GateUpOrder.INTERLEAVED, bias=True)
    views: dict[Operand, View] = {
        Operand.HIDDEN: lambda t: t.view(2, 3, 128),
        Operand.TOPK_IDS: lambda t: t.reshape(-1),
        Operand.TOPK_WEIGHTS: lambda t: t.reshape(-1),
        Operand.W13: lambda t: t.unflatten(-1, (4, 16)),
        Operand.W13_SCALE: lambda t: t.view(torch.float8_e8m0fnu),
        Operand.W2: lambda t: t.view(torch.int8),
        Operand.W2_BIAS: lambda t: t.unsqueeze(1),
    }
    module, inputs, _ = emit_into_graph(case, "cpu", views, (2, 3, 128))
    (out,) = module(*inputs)
    assert out.shape == (2, 3, 128)
    assert_close_per_token(out.view(6, 128), case.reference(), torch.bfloat16)


@pytest.mark.parametrize("size", ["tensor", "expert", "row"])
def test_global_scales_of_any_grain(size: str) -> None:
    case = make_case(NVFP4, global_scale=size)  # type: ignore[arg-type]
    views: dict[Operand, View] = {
        Operand.W13_GLOBAL: lambda t: t.reshape(()) if size == "tensor" else t.unsqueeze(-1),
        Operand.W2_GLOBAL: lambda t: t.reshape(-1) if size == "expert" else t,
    }
    module, inputs, _ = emit_into_graph(case, "cpu", views, (7, 128))
    (out,) = module(*inputs)
    assert_close_per_token(out, case.reference(), torch.bfloat16)


def test_scales_as_plain_bytes() -> None:
    case = make_case(NVFP4)
    views: dict[Operand, View] = {Operand.W13_SCALE: lambda t: t.view(torch.uint8)}
    module, inputs, _ = emit_into_graph(case, "cpu", views, (7, 128))
    (out,) = module(*inputs)
    assert_close_per_token(out, case.reference(), torch.bfloat16)


def test_relayout_is_plain_aten_and_marked() -> None:
    case = make_case(MXFP4, w13_order=GateUpOrder.INTERLEAVED)
    module, _, emitted = emit_into_graph(case, "cpu_aten", {}, (7, 128))
    marked = [node for node in module.graph.nodes if PREPARED in node.meta]
    assert {node.meta[PREPARED] for node in marked} == {"w13_halves", "w13_scale_halves"}
    namespaces = {node.target.namespace for node in module.graph.nodes if node.op == "call_function"}
    assert namespaces == {"aten", "fp4_inductor"}
    weights = {weight.name: weight for weight in emitted.weights}
    assert [name for name, weight in weights.items() if weight.prepared] == ["w13_halves", "w13_scale_halves"]
    assert {name for name, weight in weights.items() if not weight.prepared} == {"w2", "w2_scale"}
    for name, operand in (("w13_halves", Operand.W13), ("w2_scale", Operand.W2_SCALE)):
        tensor = case.operands[operand]
        weight = weights[name]
        assert (weight.shape, weight.dtype, weight.num_bytes) == (tensor.shape, tensor.dtype, tensor.nbytes)
    assert "fp4moe[cpu_aten]" in emitted.fused.meta["stack_trace"]
    assert "user.py" in emitted.fused.meta["stack_trace"]


def test_both_interpreters_of_a_plan_agree() -> None:
    case = make_case(NVFP4, w13_order=GateUpOrder.INTERLEAVED, bias=True)
    module, inputs, _ = emit_into_graph(case, "cpu", {}, (7, 128))
    plan = get_backend("cpu").plan(case.spec, CPU)
    assert torch.equal(module(*inputs)[0], run_plan(plan, case.operands))
