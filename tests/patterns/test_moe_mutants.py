"""Blocks that were changed: what still is a mixture of experts is read as it now is, all else is refused."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp4_inductor.patterns.probing import cone
from moe_graphs import calls, error_of, insert_after, moe_graph
from torch import fx

from fp4_inductor.matching import Recognition, find_matches
from fp4_inductor.spec import GateUpOrder, Operand, RouterSpec

aten = torch.ops.aten
prims = torch.ops.prims
TOLERANCE = 1.5e-2
Edit = Callable[[fx.Graph], Any]

pytest.importorskip("transformers", reason="needs transformers' models")


def gemms(graph: fx.Graph) -> list[fx.Node]:
    return calls(graph, aten._grouped_mm.default) + calls(graph, aten.bmm.default)


def reader(node: fx.Node, target: Any) -> fx.Node:
    """The user of ``node``, perhaps behind a view, that calls ``target``."""
    pending = list(node.users)
    while pending:
        user = pending.pop(0)
        if user.target is target:
            return user
        pending.extend(user.users)
    raise AssertionError(f"{target} does not read {node}")


def recognise(gm: fx.GraphModule) -> Recognition:
    gm.graph.lint()
    gm.recompile()
    return find_matches(gm.graph)


def scale(node: fx.Node, factor: float = 1.5) -> fx.Node:
    return insert_after(node, aten.mul.Tensor, node, factor)


def sort_of(graph: fx.Graph) -> fx.Node:
    return calls(graph, aten.sort.default)[0]


def perm_of(graph: fx.Graph) -> fx.Node:
    return next(user for user in sort_of(graph).users if user.args[1] == 1)


def weighting(graph: fx.Graph) -> fx.Node:
    """The product of the last GEMM's rows and the routing weights."""
    return reader(gemms(graph)[-1], aten.mul.Tensor)


def residual_inside(graph: fx.Graph) -> None:
    down = gemms(graph)[-1]
    insert_after(down, aten.add.Tensor, down, down)


def hidden_added(graph: fx.Graph) -> None:
    first, down = gemms(graph)[0], gemms(graph)[-1]
    rows = first.args[0]
    insert_after(down, aten.add.Tensor, down, rows)


def small_weights_dropped(graph: fx.Graph) -> None:
    gathered = weighting(graph).args[1]
    small = insert_after(gathered, aten.lt.Scalar, gathered, 0.1)
    dropped = insert_after(small, aten.where.ScalarSelf, small, 0.0, gathered)
    small.replace_all_uses_with(dropped, delete_user_cb=lambda user: user is weighting(graph))
    small.args = (gathered, 0.1)


def rows_dropped_by_weight(graph: fx.Graph) -> None:
    product = weighting(graph)
    kept = insert_after(product, aten.gt.Scalar, product, 0.0)
    insert_after(kept, aten.where.ScalarOther, kept, product, 0.0)


def weights_squared(graph: fx.Graph) -> None:
    gathered = weighting(graph).args[1]
    insert_after(gathered, aten.mul.Tensor, gathered, gathered)


def other_offsets(graph: fx.Graph) -> None:
    histc = calls(graph, aten.histc.default)[0]
    histc.update_arg(3, 6)


def offsets_not_summed(graph: fx.Graph) -> None:
    cumsum, histc = calls(graph, aten.cumsum.default)[0], calls(graph, aten.histc.default)[0]
    cast = insert_after(histc, prims.convert_element_type.default, histc, torch.int32)
    cumsum.replace_all_uses_with(cast)


def offsets_of_other_ids(graph: fx.Graph) -> None:
    values = next(user for user in sort_of(graph).users if user.args[1] == 0)
    shifted = insert_after(values, aten.add.Tensor, values, 1)
    insert_after(shifted, aten.clamp_max.default, shifted, 7)


def sort_descending(graph: fx.Graph) -> None:
    sort = sort_of(graph)
    sort.args = (sort.args[0], -1, True)


def sort_by_another_key(graph: fx.Graph) -> None:
    sort, old = sort_of(graph), perm_of(graph)
    ids = sort.args[0]
    with graph.inserting_before(sort):
        negated = graph.call_function(aten.neg.default, (ids,))
        negated.meta["val"] = ids.meta["val"]
        other = graph.call_function(aten.sort.default, (negated,))
        other.meta["val"] = sort.meta["val"]
        perm = graph.call_function(operator.getitem, (other, 1))
        perm.meta["val"] = ids.meta["val"]
    old.replace_all_uses_with(perm)


def tokens_of_other_slots(graph: fx.Graph) -> None:
    calls(graph, aten.div.Tensor_mode)[0].update_arg(1, 4)


def never_unsorted(graph: fx.Graph) -> None:
    calls(graph, aten.index_put.default)[0].replace_all_uses_with(perm_of(graph))


def extra_reader(graph: fx.Graph) -> None:
    output = graph.output_node()
    output.args = ((*output.args[0], gemms(graph)[0]),)


def extra_reader_of_the_product(graph: fx.Graph) -> None:
    output = graph.output_node()
    output.args = ((*output.args[0], weighting(graph)),)


def changed_in_place(graph: fx.Graph) -> None:
    down = gemms(graph)[-1]
    scale(down)
    calls(graph, aten.mul.Tensor)[-1]
    reader(down, aten.mul.Tensor).target = aten.mul_.Tensor


def other_experts_down(graph: fx.Graph) -> None:
    down = gemms(graph)[-1]
    weight = down.args[1] if down.target is aten._grouped_mm.default else down.args[0]
    insert_after(weight, aten.flip.default, weight, [0])


def gate_clamped(graph: fx.Graph) -> None:
    gate = next(user for user in calls(graph, aten.split.Tensor)[0].users if user.args[1] == 0)
    insert_after(gate, aten.clamp_max.default, gate, 5.0)


GROUPED: dict[str, Edit] = {
    "offsets stop early": other_offsets,
    "offsets are counts": offsets_not_summed,
    "offsets of other ids": offsets_of_other_ids,
    "sorted downwards": sort_descending,
    "sorted by another key": sort_by_another_key,
    "tokens of other slots": tokens_of_other_slots,
    "never unsorted": never_unsorted,
    "small weights are dropped": small_weights_dropped,
    "weights squared after they are sorted": weights_squared,
}
ANY: dict[str, Edit] = {
    "down projection scaled": lambda graph: scale(gemms(graph)[-1]),
    "gate_up projection scaled": lambda graph: scale(gemms(graph)[0]),
    "weighted rows scaled": lambda graph: scale(weighting(graph)),
    "weighted rows clamped": lambda graph: insert_after(
        weighting(graph), aten.clamp_max.default, weighting(graph), 1e4
    ),
    "down projection doubled": residual_inside,
    "a GEMM is read outside": extra_reader,
    "the product is read outside": extra_reader_of_the_product,
    "changed in place": changed_in_place,
    "down projection of other experts": other_experts_down,
    "rows dropped by sign": rows_dropped_by_weight,
    "gate clamped alone": gate_clamped,
}


@pytest.mark.parametrize("name", [*ANY, *GROUPED])
def test_sorted_block_is_refused(name: str) -> None:
    gm = moe_graph("mixtral", "grouped_mm", layers=1)
    {**ANY, **GROUPED}[name](gm.graph)
    _check_refused(recognise(gm))


@pytest.mark.parametrize("name", list(ANY))
def test_gathered_block_is_refused(name: str) -> None:
    gm = moe_graph("qwen3_moe", "batched_mm", layers=1)
    ANY[name](gm.graph)
    _check_refused(recognise(gm))


def _check_refused(found: Recognition) -> None:
    assert found.matches == ()
    assert len(found.near_misses) == 2
    for miss in found.near_misses:
        assert miss.reason
        assert miss.packed_bytes > 0
        assert miss.where.file
    assert max(miss.progress for miss in found.near_misses) > 0


def test_biases_of_other_experts_are_refused() -> None:
    for form in ("grouped_mm", "batched_mm"):
        gm = moe_graph("gpt_oss", form, layers=1)
        bias = next(
            node
            for node in calls(gm.graph, aten.index.Tensor)
            if node.args[0].meta["val"].dim() == 2 and node.args[0].op == "placeholder"
        )
        index = bias.args[1][0]
        with gm.graph.inserting_before(bias):
            wrong = gm.graph.call_function(aten.flip.default, (index, [0]))
            wrong.meta["val"] = index.meta["val"]
        bias.args = (bias.args[0], [wrong])
        _check_refused(recognise(gm))


@pytest.mark.parametrize("factor", [1.003, 0.9961])
def test_a_factor_smaller_than_the_roundings_is_seen(factor: float) -> None:
    """Three bfloat16 roundings, which products with a global scale may go through, come to more than that."""
    gm = moe_graph("mixtral", "batched_mm", "nvfp4", layers=1)
    product = reader(calls(gm.graph, aten.__rshift__.Scalar)[0], aten.mul.Tensor)
    while (further := next(iter(product.users))).target is aten.mul.Tensor:
        product = further
    scale(product, factor)
    _check_refused(recognise(gm))


def test_swapped_gate_and_up_are_read_as_such() -> None:
    gm = moe_graph("qwen3_moe", "grouped_mm")
    split = calls(gm.graph, aten.split.Tensor)[0]
    for half in list(split.users):
        half.args = (split, 1 - half.args[1])
    first, second = recognise(gm).matches
    assert first.spec.w13_order is GateUpOrder.UP_GATE
    assert second.spec.w13_order is GateUpOrder.GATE_UP
    assert max(error_of(gm, first), error_of(gm, second)) < TOLERANCE


def test_no_renormalisation_concerns_the_router_alone() -> None:
    gm = moe_graph("mixtral", "grouped_mm")
    top = next(user for user in calls(gm.graph, aten.topk.default)[0].users if user.args[1] == 0)
    reader(top, aten.div.Tensor).replace_all_uses_with(top)
    first, second = recognise(gm).matches
    assert isinstance(first.spec.router, RouterSpec)
    assert isinstance(second.spec.router, RouterSpec)
    assert (first.spec.router.renormalize, second.spec.router.renormalize) == (False, True)
    assert error_of(gm, first) < TOLERANCE


def test_weights_of_other_layers_are_the_operands() -> None:
    gm = moe_graph("mixtral", "grouped_mm")
    first, second = recognise(gm).matches
    down, other = first.operands[Operand.W2], second.operands[Operand.W2]
    nodes = gemms(gm.graph)
    moved, kept = nodes[1].args[1], nodes[3].args[1]
    nodes[1].replace_input_with(moved, kept)
    nodes[3].replace_input_with(kept, moved)
    for node in cone([kept], ()):
        if node.op == "call_function":
            nodes[1].prepend(node)
    found = recognise(gm)
    assert [match.operands[Operand.W2] for match in found.matches] == [other, down]
    assert max(error_of(gm, match) for match in found.matches) < TOLERANCE


def test_scale_behind_the_sum_stays_outside() -> None:
    gm = moe_graph("mixtral", "grouped_mm", layers=1)
    total = calls(gm.graph, aten.sum.dim_IntList)[-1]
    scale(total)
    (match,) = recognise(gm).matches
    assert match.output is total
    assert match.spec.out_dtype is torch.float32
    assert error_of(gm, match) < TOLERANCE
