"""Compile one family in one form with its blocks lowered, and hold each block to float64 on the values it gets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from family_models import FAMILIES, build
from fp4_inductor.patterns.router_formulas import scores_of
from models import token_ids
from moe_graphs import operand_values, run
from torch import fx, nn

from fp4_inductor import DeviceInfo, Options, quantize_
from fp4_inductor.backends import get_backend
from fp4_inductor.emit import emit_plan
from fp4_inductor.lowering_pass import lower
from fp4_inductor.matching import Match, NearMiss, find_matches
from fp4_inductor.reference import moe_reference
from fp4_inductor.spec import MoESpec, Operand, RouterSpec

FORMS = ("grouped_mm", "batched_mm")
_CPU = DeviceInfo.parse("cpu")


@dataclass(frozen=True)
class Block:
    """One block of a run: the fused op's result and the one as written, beside the mixture in float64 ``[T, H]``.

    ``tied`` says of each token ``[T]`` whether rounding may choose its experts.
    """

    match: Match
    fused: torch.Tensor
    as_written: torch.Tensor
    reference: torch.Tensor
    tied: torch.Tensor


@dataclass(frozen=True)
class Run:
    """What became of a family in one form. The two outputs, ``[T, ...]`` float64, are the whole model's."""

    blocks: tuple[Block, ...]
    near_misses: tuple[NearMiss, ...]
    num_graphs: int
    lowered: torch.Tensor
    eager: torch.Tensor


def format_of(family: str) -> str:
    """The two formats in turn."""
    return ("mxfp4", "nvfp4")[list(FAMILIES).index(family) % 2]


@functools.lru_cache(maxsize=1)
def quantized(family: str) -> nn.Module:
    """The family's model with FP4 experts; the two forms of a family follow each other and share it."""
    return quantize_(build(family), format_of(family))


def run_family(family: str, form: str) -> Run:
    """Run the model of ``family`` eagerly, and compiled with every block lowered for the CPU."""
    model, ids = quantized(family), token_ids(12, batch=2)
    model.set_experts_implementation(form)
    graphs: list[_Graph] = []
    torch._dynamo.reset()
    with torch.no_grad():
        eager = _output(model(input_ids=ids))
        lowered = _output(torch.compile(model, backend=_backend(graphs), dynamic=False)(input_ids=ids))
    torch._dynamo.reset()
    return Run(
        blocks=tuple(block for graph in graphs for block in graph.blocks),
        near_misses=tuple(miss for graph in graphs for miss in graph.near_misses),
        num_graphs=len(graphs),
        lowered=lowered,
        eager=eager,
    )


def _output(outputs: Any) -> torch.Tensor:
    value: torch.Tensor = outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state
    return value.double().flatten(0, -2)


class _Graph:
    """A compiled graph: a call measures every block as written and fused, and answers with the lowered graph."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.measured = fx.GraphModule(gm, _copy_graph(gm))
        found = find_matches(self.measured.graph)
        self.near_misses = found.near_misses
        self.fused = [(match, self._emit(match)) for match in found.matches]
        lower(gm.graph, Options(on_unsupported="error"), _CPU)
        gm.recompile()
        self.lowered = gm
        self.blocks: list[Block] = []
        self._boxed_call = True

    def _emit(self, match: Match) -> fx.Node:
        plan = get_backend("cpu").plan(match.spec, _CPU)
        return emit_plan(self.measured.graph, match, plan, "cpu").result

    def __call__(self, args: list[Any]) -> Any:
        values = run(self.measured, args)
        for match, fused in self.fused:
            operands = operand_values(match, values)
            reference = moe_reference(match.spec, operands)
            sides = [values[node].reshape(reference.shape) for node in (fused, match.output)]
            self.blocks.append(Block(match, *sides, reference, _tied(match.spec, operands)))
        return self.lowered.forward(*args)


def _tied(spec: MoESpec, operands: Mapping[Operand, torch.Tensor]) -> torch.Tensor:
    """Tokens ``[T]`` whose last expert leads the next best by less than bfloat16 rounds what it is selected by."""
    router, logits, bias = spec.router, operands.get(Operand.ROUTER_LOGITS), operands.get(Operand.ROUTER_BIAS)
    if not isinstance(router, RouterSpec) or router.ids_given or logits is None:
        return torch.zeros(len(operands[Operand.TOPK_IDS]), dtype=torch.bool)
    logits = logits.double().reshape(-1, logits.shape[-1])
    _, selection = scores_of(router, logits, None if bias is None else bias.double().reshape(-1))
    last, next_best = selection.topk(spec.top_k + 1).values[:, -2:].unbind(-1)
    return last - next_best < torch.finfo(torch.bfloat16).eps / 2 * last.abs()


def _copy_graph(gm: fx.GraphModule) -> fx.Graph:
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return graph


def _backend(graphs: list[_Graph]) -> Callable[[fx.GraphModule, Sequence[Any]], Any]:
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    def inner(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> _Graph:
        graphs.append(_Graph(gm))
        return graphs[-1]

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        with config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
            return compile_fx(gm, list(example_inputs), inner_compile=inner)

    return backend
