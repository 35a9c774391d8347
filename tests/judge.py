"""Whether what recognition says of a graph is true: run the graph in float64, beside what its matches mean.

This runs graphs without any code of the recogniser. Floats are float64 and casts between wide floats do
nothing, save where bits of a float are read. So a graph and a true match agree to rounding of float64. Weights
may also be made exactly as the graph makes them: on the values drawn here no format rounds a product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from fp4_inductor.patterns.router import router_reference
from torch import fx
from torch.fx.node import map_aggregate

from fp4_inductor.matching import Match, Source, nodes_of
from fp4_inductor.reference import moe_reference
from fp4_inductor.spec import Operand, RouterSpec

aten, prims = torch.ops.aten, torch.ops.prims
WIDE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = 1e-6


class NoRun(Exception):
    """A graph that does not take its inputs."""


@dataclass(frozen=True)
class Regime:
    """How inputs are drawn.

    Attributes:
        amplitude: of hidden states.
        bias_shift: added to vectors, so that scores that experts are selected by turn negative.
        crowded: all tokens are nearly alike, and go to the same experts.
    """

    name: str
    amplitude: float = 1.0
    bias_shift: float = 0.0
    crowded: bool = False


REGIMES = (
    Regime("usual"),
    Regime("large", amplitude=20.0),
    Regime("tiny", amplitude=0.02),
    Regime("crowded", crowded=True),
    Regime("negative", amplitude=3.0, bias_shift=-3.0),
)


@dataclass(frozen=True)
class Role:
    """What a placeholder is drawn as: "hidden", "codes", "scale", "global", "vector", "matrix", "scalar" or "size"."""

    kind: str
    size: tuple[int, ...]
    dtype: torch.dtype


def roles_of(gm: fx.GraphModule, matches: Sequence[Match]) -> dict[str, Role | int]:
    """How to draw every placeholder of a graph whose true matches are known; a dynamic size stands for itself."""
    kinds = {}
    for match in matches:
        for operand, source in match.operands.items():
            kind = _KINDS.get(operand)
            kinds.update({node.name: kind for node in nodes_of(source) if kind is not None})
    found: dict[str, Role | int] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        val = node.meta["val"]
        if not isinstance(val, torch.Tensor):
            found[node.name] = _number(val)
            continue
        size = tuple(map(_number, val.shape))
        guess = {0: "scalar", 1: "vector", 2: "matrix"}.get(len(size), "hidden")
        found[node.name] = Role(kinds.get(node.name, guess), size, val.dtype)
    return found


_KINDS = {
    Operand.W13: "codes",
    Operand.W2: "codes",
    Operand.W13_SCALE: "scale",
    Operand.W2_SCALE: "scale",
    Operand.W13_GLOBAL: "global",
    Operand.W2_GLOBAL: "global",
    Operand.W13_BIAS: "vector",
    Operand.W2_BIAS: "vector",
}


def _number(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def draw(roles: Mapping[str, Role | int], regime: Regime, seed: int) -> list[Any]:
    """A value for every placeholder."""
    generator = torch.Generator().manual_seed(seed)
    return [role if isinstance(role, int) else _drawn(role, regime, generator) for role in roles.values()]


def _drawn(role: Role, regime: Regime, generator: torch.Generator) -> torch.Tensor:
    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    def between(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, role.size, generator=generator)

    if role.kind == "codes":
        return between(0, 256).to(torch.uint8).view(role.dtype)
    if role.kind == "scale" and role.dtype is torch.uint8:
        return between(121, 126).to(torch.uint8)
    if role.kind == "scale":
        return between(0x20, 0x40).to(torch.uint8).view(role.dtype)
    if role.kind == "global":  # powers of two, with which no product of the dequantisation is rounded
        return torch.ldexp(torch.ones(role.size), between(-3, 2)).to(role.dtype)
    if role.kind == "scalar":
        return torch.tensor(1.25, dtype=role.dtype)
    if role.kind == "hidden":
        tokens = normal(*role.size)
        if regime.crowded:
            tokens = normal(role.size[-1]) + 0.05 * tokens
        return (tokens * regime.amplitude).to(role.dtype)
    if not role.dtype.is_floating_point:
        return between(0, 2).to(role.dtype)
    if role.kind == "vector":  # multiples of 1/64, that every dtype holds
        return ((normal(*role.size) * 16).round() / 64 + regime.bias_shift).to(role.dtype)
    return (normal(*role.size) * 0.5 / role.size[-1] ** 0.5).to(role.dtype)


class Run:
    """One run of a graph, every value kept.

    ``at_output`` holds, for each match, its output when that was computed, and its operands at that time: a
    fused call in its place would read them then.
    """

    def __init__(
        self, gm: fx.GraphModule, matches: Sequence[Match], inputs: Sequence[Any], exact: set[fx.Node]
    ) -> None:
        self.exact = exact
        self.values: dict[fx.Node, Any] = {}
        self.at_output: dict[fx.Node, tuple[torch.Tensor, dict[Operand, torch.Tensor]]] = {}
        outputs = {match.output: match for match in matches}
        rest = iter(inputs)
        with torch.no_grad():
            for node in gm.graph.nodes:
                if node.op == "placeholder":
                    value = next(rest)
                    self.values[node] = value.clone() if isinstance(value, torch.Tensor) else value
                elif node.op == "get_attr":
                    self.values[node] = attrgetter(str(node.target))(gm)
                elif node.op == "call_function":
                    self.values[node] = self._call(node)
                if node in outputs:
                    operands = outputs[node].operands.items()
                    given = {operand: self._given(source).clone() for operand, source in operands}
                    self.at_output[node] = self.values[node].clone(), given

    def _given(self, source: Source) -> torch.Tensor:
        parts = [self.values[node] for node in nodes_of(source)]
        if isinstance(source, fx.Node):
            return parts[0]
        function = source.function
        if isinstance(function, partial) and function.keywords.get("dtype") in WIDE:
            function = partial(function, dtype=torch.float64)  # a cast like those of the graph
        return function(*parts)

    def _call(self, node: fx.Node) -> Any:
        target, name = node.target, str(node.target)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        if name.startswith(("aten.empty", "aten.new_empty")):
            return self._poison(node)
        if node in self.exact or not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
            return target(*args, **kwargs)
        if target is prims.convert_element_type.default and args[1] in WIDE:
            return args[0].to(torch.float64)
        args, kwargs = map_aggregate((args, kwargs), _widened)
        if name in ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default"):
            return grouped_mm(*args, **kwargs)
        return target(*args, **kwargs)

    def _poison(self, node: fx.Node) -> torch.Tensor:
        """What uninitialised memory may hold."""
        val = node.meta["val"]
        size = [int(self.values[s]) if isinstance(s, fx.Node) else s for s in node.args[0]]
        return torch.full(size, float("nan") if val.dtype.is_floating_point else 101, dtype=val.dtype)


def _before_bits(graph: fx.Graph) -> set[fx.Node]:
    """What leads to a float whose bits are read, or is read from one: it keeps the dtypes that it has."""
    views = [node for node in graph.nodes if node.target is aten.view.dtype]
    found = set(views)
    pending = [node.args[0] for node in views if node.args[0].meta["val"].dtype in WIDE]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def _weights(graph: fx.Graph, matches: Sequence[Match]) -> set[fx.Node]:
    """What does not depend on hidden states."""
    carrying: set[fx.Node] = set()
    pending = [match.node(Operand.HIDDEN) for match in matches]
    while pending:
        node = pending.pop()
        pending += [] if node in carrying else node.all_input_nodes
        carrying.add(node)
    for node in graph.nodes:
        if carrying.intersection(node.all_input_nodes):
            carrying.add(node)
    return set(graph.nodes) - carrying


def _widened(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor) and arg.dtype in WIDE:
        return arg.double()
    return torch.float64 if isinstance(arg, torch.dtype) and arg in WIDE else arg


def grouped_mm(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Rows ``x [S, K]`` that lie before each of ``offs [E]`` by ``weight [E, K, N]``; rows of no group are NaN."""
    out = x.new_full((x.shape[0], weight.shape[-1]), float("nan"))
    start = 0
    for expert, end in enumerate(offs.tolist()):
        out[start:end] = x[start:end] @ weight[expert]
        start = end
    return out


def worst_error(gm: fx.GraphModule, matches: Sequence[Match], inputs: Sequence[Any]) -> float:
    """How far any match is from the graph on ``inputs``: its experts, and its router where it names one.

    A graph may leave rows of no expert unwritten; tokens into which it sums them have no value.

    Raises:
        NoRun: the graph does not take the inputs.
    """
    if not matches:
        return 0.0
    errors = []
    for exact in (_before_bits(gm.graph), _before_bits(gm.graph) | _weights(gm.graph, matches)):
        errors.append(_error(gm, matches, inputs, exact))
        if errors[-1] <= TOLERANCE:
            break
    return min(errors)


def _error(gm: fx.GraphModule, matches: Sequence[Match], inputs: Sequence[Any], exact: set[fx.Node]) -> float:
    try:
        run = Run(gm, matches, inputs, exact)
    except Exception as error:  # noqa: BLE001  whatever an operation raises for values that it cannot take
        raise NoRun(str(error)) from None
    errors = [0.0]
    for match in matches:
        spec = match.spec
        out, operands = run.at_output[match.output]
        given = {operand: _canonical(operand, value, spec) for operand, value in operands.items()}
        got, want = out.reshape(-1, spec.hidden_size), moe_reference(spec, given)
        ids = given[Operand.TOPK_IDS]
        unwritten = ((ids < 0) | (ids >= spec.num_experts)).any(-1) & got.isnan().any(-1)
        errors.append(_difference(got[~unwritten], want[~unwritten]))
        if isinstance(spec.router, RouterSpec):
            errors.append(_router_difference(spec.router, given, spec.top_k))
    return max(errors)


def _canonical(operand: Operand, value: torch.Tensor, spec: Any) -> torch.Tensor:
    if operand in (Operand.TOPK_IDS, Operand.TOPK_WEIGHTS):
        return value.reshape(-1, spec.top_k)
    if operand is Operand.HIDDEN:
        return value.reshape(-1, spec.hidden_size)
    if operand is Operand.ROUTER_LOGITS:
        return value.reshape(-1, spec.num_experts)
    if operand in (Operand.W13_GLOBAL, Operand.W2_GLOBAL):
        return value.reshape(1, 1) if value.numel() == 1 else value.reshape(spec.num_experts, -1)
    shapes = {
        Operand.W13: (spec.w13_rows, spec.hidden_size // 2),
        Operand.W2: (spec.hidden_size, spec.intermediate_size // 2),
        Operand.W13_SCALE: (spec.w13_rows, -1),
        Operand.W2_SCALE: (spec.hidden_size, -1),
        Operand.W13_BIAS: (spec.w13_rows,),
        Operand.W2_BIAS: (spec.hidden_size,),
    }
    return value.reshape(spec.num_experts, *shapes[operand]) if operand in shapes else value


def _router_difference(router: RouterSpec, given: Mapping[Operand, torch.Tensor], top_k: int) -> float:
    scale, bias = given.get(Operand.ROUTER_SCALE), given.get(Operand.ROUTER_BIAS)
    ids, weights = router_reference(
        router,
        given[Operand.ROUTER_LOGITS].double(),
        top_k,
        None if bias is None else bias.double().reshape(-1),
        None if scale is None else float(scale),
    )
    got_ids, order = given[Operand.TOPK_IDS].long().sort(-1)
    want_ids, wanted = ids.sort(-1)
    got = given[Operand.TOPK_WEIGHTS].double().gather(-1, order)
    ran = got.isfinite().all(-1)  # a softmax that does not subtract its maximum overflows
    if not torch.equal(got_ids[ran], want_ids[ran]):
        return float("inf")
    return _difference(got[ran], weights.gather(-1, wanted)[ran])


def _difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Worst over tokens, relative to the token; infinite where only one of them is finite."""
    neither = ~(got.isfinite().all(-1) | want.isfinite().all(-1))
    got, want = got[~neither].double(), want[~neither]
    if not got.numel():
        return 0.0
    size = want.abs().amax(-1, keepdim=True).clamp_min(1e-12 * float(want.abs().max()) + 1e-300)
    error = float(((got - want).abs() / size).amax())
    return error if error < float("inf") else float("inf")
