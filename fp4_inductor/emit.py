"""Write a ``KernelPlan`` into a graph: the second interpreter of plans, beside ``plan.run_plan``.

Weight re-layout is written out as plain ATen nodes, so it can be read in every dump. Nodes that
end a re-layout carry ``meta[PREPARED]``; ``fold`` turns exactly those into constants.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._guards import detect_fake_mode, tracing
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx

from .matching import WRITTEN, Assembled, Match, nodes_of
from .plan import KernelPlan, Prepared, resolve_op
from .spec import MoESpec, Operand

PREPARED = "fp4_prepared"
"""Key in ``fx.Node.meta``: the name of the prepared tensor that the node computes."""

FUSED = "fp4_fused"
"""Key in ``fx.Node.meta``: the name of the backend whose op the node calls."""

_PER_CALL = (Operand.HIDDEN, Operand.TOPK_IDS, Operand.TOPK_WEIGHTS)
"""What differs from call to call, and so is no weight to prepare."""

_EXPERT_WEIGHTS = (
    *(Operand.W13, Operand.W13_SCALE, Operand.W13_GLOBAL, Operand.W13_BIAS),
    *(Operand.W2, Operand.W2_SCALE, Operand.W2_GLOBAL, Operand.W2_BIAS),
)

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class KernelWeight:
    """A weight as the fused call reads it: ``prepared``, by a re-layout that folds, or as the model holds it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    prepared: bool

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Emitted:
    """``fused`` is the call; ``result`` stands for the match's output (``fused``, or a reshape of it)."""

    fused: fx.Node
    result: fx.Node
    weights: tuple[KernelWeight, ...]


def fused_calls(graph: fx.Graph) -> list[tuple[fx.Node, str]]:
    """The calls that ``emit_plan`` wrote, and the qualified names of their ops."""
    return [(node, node.target.name()) for node in graph.nodes if FUSED in node.meta]


def emit_plan(graph: fx.Graph, match: Match, plan: KernelPlan, backend: str) -> Emitted:
    """Insert the fused call before the match's output.

    The output keeps its users: the caller moves them when every block is written, since one block's
    output may be another's operand.
    """
    with graph.inserting_before(match.output):
        writer = _Writer(graph, match, backend)
        operands = {operand: writer.canonical(operand) for operand in plan.operands}
        apart = match.spec.weight_on_input and not plan.weighs_input
        if apart:
            operands |= writer.weighted_rows()
        prepared = {p.name: writer.computed(p.name, p.fn, [operands[o] for o in p.of]) for p in plan.prepared}
        args = [
            prepared[arg.name] if isinstance(arg, Prepared) else operands[arg] if isinstance(arg, Operand) else arg
            for arg in plan.args
        ]
        fused = writer.call(resolve_op(plan.op), *args)
        fused.meta[FUSED] = backend
        # Without them Inductor takes a call that a pass wrote for one that reads any strides, and drops our copies.
        fused.meta["eager_input_vals"] = (fx.map_arg(tuple(args), lambda node: node.meta["val"]), {})
        weights = _weights(plan, operands, prepared)
        result = writer.shaped_like_output(writer.summed_slots(fused) if apart else fused)
    return Emitted(fused, result, weights)


def _weights(
    plan: KernelPlan, operands: Mapping[Operand, fx.Node], prepared: Mapping[str, fx.Node]
) -> tuple[KernelWeight, ...]:
    """What the call reads of the experts' weights, and whatever else folds, each tensor once."""
    found: dict[fx.Node, KernelWeight] = {}
    for arg in plan.args:
        if not isinstance(arg, Operand | Prepared):
            continue
        node, name = (prepared[arg.name], arg.name) if isinstance(arg, Prepared) else (operands[arg], str(arg))
        if PREPARED in node.meta or arg in _EXPERT_WEIGHTS:
            value = node.meta["val"]
            found.setdefault(node, KernelWeight(name, tuple(value.shape), value.dtype, PREPARED in node.meta))
    return tuple(found.values())


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


class _Kind(NamedTuple):
    """What a trace depends on of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@lru_cache(maxsize=256)
def _traced(function: Callable[..., torch.Tensor], kinds: tuple[_Kind, ...]) -> fx.Graph:
    with tracing(None), unset_fake_temporarily(), FakeTensorMode():
        return _trace(function, [torch.empty_strided(k.shape, k.stride, dtype=k.dtype, device=k.device) for k in kinds])


def _trace(function: Callable[..., torch.Tensor], values: Sequence[torch.Tensor]) -> fx.Graph:
    """Inductor's decompositions have run by now, and its lowerings expect what they leave."""
    from torch._inductor.decomposition import select_decomp_table

    # Tracing counts a function's own arguments, of which a bound method has one more.
    return make_fx(lambda *given: function(*given), decomposition_table=select_decomp_table())(*values).graph


class _Writer:
    """Creates nodes with fake values and with the trace of the block they replace."""

    def __init__(self, graph: fx.Graph, match: Match, backend: str) -> None:
        self.graph, self.match, self.spec = graph, match, match.spec
        nodes = [node for source in match.operands.values() for node in nodes_of(source)]
        self.fake_mode = detect_fake_mode([node.meta["val"] for node in nodes if "val" in node.meta])
        note = f"fp4moe[{backend}] replaced {len(match.nodes)} nodes ({match.pattern})"
        frame = f'  File "fp4moe://{match.pattern}", line 1, in rewrite\n    {note}\n'
        self.meta = {
            "stack_trace": match.output.meta.get("stack_trace", "") + frame,
            "nn_module_stack": match.output.meta.get("nn_module_stack"),
            WRITTEN: True,
        }

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        values: tuple[Any, ...] = fx.map_arg(args, _value)
        keywords: dict[str, Any] = fx.map_arg(kwargs, _value)
        with self.fake_mode or contextlib.nullcontext():
            node.meta["val"] = target(*values, **keywords)
        node.meta.update({key: value for key, value in self.meta.items() if value})
        return node

    def canonical(self, operand: Operand) -> fx.Node:
        """The operand's node, in the shape and dtype that ``Operand`` promises to kernels."""
        node = self.match.operands[operand]
        if isinstance(node, Assembled):
            if operand not in _PER_CALL:
                return self.computed(str(operand), node.function, node.parts)
            node = self.computed(str(operand), node.function, node.parts, prepared=False)
        value = node.meta["val"]
        bits = _packed_dtype(operand, self.spec)
        if bits is not None and value.dtype is not bits:
            node = self.call(aten.view.dtype, node, bits)  # the same bytes under another name
        shape = _canonical_shape(operand, self.spec, value)
        if shape is None or tuple(value.shape) == shape:
            return node
        return self.call(aten.reshape.default, node, list(shape))

    def weighted_rows(self) -> dict[Operand, fx.Node]:
        """Hidden states times routing weights, a row for every slot, as tokens of one expert each with weight 1."""
        hidden, ids, weights = (self.canonical(o) for o in (Operand.HIDDEN, Operand.TOPK_IDS, Operand.TOPK_WEIGHTS))
        per_slot = self.call(aten.unsqueeze.default, hidden, 1), self.call(aten.unsqueeze.default, weights, -1)
        rows = self.call(aten.mul.Tensor, *per_slot)
        if rows.meta["val"].dtype is not hidden.meta["val"].dtype:
            rows = self.call(torch.ops.prims.convert_element_type.default, rows, hidden.meta["val"].dtype)
        column = self.call(aten.reshape.default, ids, [-1, 1])
        count = column.meta["val"].shape[0]
        size = count if isinstance(count, int) else self.call(aten.sym_size.int, column, 0)
        given = weights.meta["val"]
        return {
            Operand.HIDDEN: self.call(aten.reshape.default, rows, [-1, self.spec.hidden_size]),
            Operand.TOPK_IDS: column,
            Operand.TOPK_WEIGHTS: self.call(aten.full.default, [size, 1], 1, dtype=given.dtype, device=given.device),
        }

    def summed_slots(self, fused: fx.Node) -> fx.Node:
        """``fused`` [T*k, H] to [T, H]."""
        if self.spec.top_k == 1:
            return fused
        rows = self.call(aten.reshape.default, fused, [-1, self.spec.top_k, self.spec.hidden_size])
        return self.call(aten.sum.dim_IntList, rows, [1])

    def computed(
        self, name: str, function: Callable[..., torch.Tensor], inputs: Sequence[fx.Node], *, prepared: bool = True
    ) -> fx.Node:
        """Trace a re-layout on fake tensors and copy its ATen nodes here.

        Inductor's decompositions have run by now, and its lowerings expect what they leave.
        """
        env: dict[fx.Node, fx.Node] = {}
        sources = iter(inputs)
        result: fx.Node | None = None
        for node in self.traced(function, [node.meta["val"] for node in inputs]).nodes:
            if node.op == "placeholder":
                env[node] = next(sources)
            elif node.op == "output":
                result = env[node.args[0]]
            else:
                functional = node.op == "call_function" and not node.is_impure()
                assert functional, f"re-layout {name} must be plain tensor functions, without updates in place"
                args, kwargs = (fx.map_arg(of, env.__getitem__) for of in (node.args, node.kwargs))
                env[node] = self.call(node.target, *args, **kwargs)
        assert result is not None
        if prepared and result.op != "placeholder":
            result.meta[PREPARED] = name
        return result

    def traced(self, function: Callable[..., torch.Tensor], values: Sequence[torch.Tensor]) -> fx.Graph:
        """``function`` as ATen nodes; equal weights of other layers are not traced again."""
        kinds = tuple(_Kind(tuple(v.shape), tuple(v.stride()), v.dtype, v.device) for v in values)
        if all(isinstance(size, int) for kind in kinds for size in kind.shape + kind.stride):
            return _traced(function, kinds)
        with self.fake_mode or contextlib.nullcontext():
            return _trace(function, values)

    def shaped_like_output(self, fused: fx.Node) -> fx.Node:
        """``fused`` [T, H] in the shape of the node that it replaces."""
        shape = self.match.output.meta["val"].shape
        if len(shape) == 2:
            return fused
        hidden = self.match.node(Operand.HIDDEN)
        sizes: list[int | fx.Node] = []
        for axis, size in enumerate(shape):
            if isinstance(size, int):
                sizes.append(size)
            elif sum(not isinstance(s, int) for s in shape) == 1:
                sizes.append(-1)
            else:
                assert hidden.meta["val"].shape == shape, "an output with several symbolic axes is shaped like hidden"
                sizes.append(self.call(aten.sym_size.int, hidden, axis))
        return self.call(aten.reshape.default, fused, sizes)


def _packed_dtype(operand: Operand, spec: MoESpec) -> torch.dtype | None:
    """The dtype under which kernels read packed bytes, None for operands that hold numbers."""
    if operand in (Operand.W13, Operand.W2):
        return torch.uint8
    if operand in (Operand.W13_SCALE, Operand.W2_SCALE):
        return spec.weight_format.scale_dtype
    return None


def _canonical_shape(operand: Operand, spec: MoESpec, value: torch.Tensor) -> tuple[int, ...] | None:
    """The shape kernels expect (-1 for tokens), None where the node's own shape is right by definition."""
    experts, fmt = spec.num_experts, spec.weight_format
    rows, columns = spec.w13_rows, spec.hidden_size
    if operand in (Operand.W2, Operand.W2_SCALE, Operand.W2_GLOBAL, Operand.W2_BIAS):
        rows, columns = spec.hidden_size, spec.intermediate_size
    if operand is Operand.HIDDEN:
        return None if value.ndim == 2 else (-1, spec.hidden_size)
    if operand in (Operand.TOPK_IDS, Operand.TOPK_WEIGHTS):
        return None if value.ndim == 2 and value.shape[1] == spec.top_k else (-1, spec.top_k)
    if operand in (Operand.W13, Operand.W2):
        return experts, rows, columns // 2
    if operand in (Operand.W13_SCALE, Operand.W2_SCALE):
        return experts, rows, columns // fmt.block_size
    if operand in (Operand.W13_GLOBAL, Operand.W2_GLOBAL):
        if value.numel() == experts * rows:
            return experts, rows
        assert value.numel() in (1, experts), f"global scale {tuple(value.shape)} is per tensor, expert or row"
        return value.numel(), 1
    if operand in (Operand.W13_BIAS, Operand.W2_BIAS):
        return experts, rows
    return None
