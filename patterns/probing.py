"""Run a piece of a graph on the CPU, to see what it computes instead of how it is spelled.

Two readings of the same nodes:

- *formula* (``exact=False``): every float is float64 and casts between floats do nothing, so two
  spellings of one formula agree to rounding of float64, whatever dtypes the graph passes through;
- *exact* (``exact=True``): every operation runs in its own dtype, bit by bit.

Probes are small: where a feed is smaller than the value it stands for, shapes written in the graph
are scaled with it, and only operations that treat every index of a scaled axis alike are run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from ..matching import NoMatch
from .resizing import check_resizable, op_name, regroup, resize_leading

_EXECUTION_ERRORS = (
    RuntimeError,
    TypeError,
    ValueError,
    IndexError,
    KeyError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    MemoryError,
)
"""What running an operation on unforeseen values may raise; all of it means "not the idiom"."""

_UNBACKED_SIZE = 8
"""Stands in for a size that only data decides."""

WIDE_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Casts between these are rounding; a cast to a narrower float is a quantisation and belongs to no formula."""

_VIEWS = {"view", "reshape", "_unsafe_view", "_reshape_alias"}
_EMPTIES = {"empty", "new_empty", "empty_like", "empty_strided", "empty_permuted", "new_empty_strided"}
_GROUPED_MM = {"aten._grouped_mm.default", "transformers.grouped_mm_fallback.default"}
_NAMESPACES = ("aten", "prims", "fp4_inductor")
_PURE_MODULES = ("_operator", "math", "builtins")


def size_hint(size: int | torch.SymInt, symbols: Mapping[Any, int] | None = None) -> int:
    """A concrete value for a size, without guarding on it: by ``symbols``, else the one it was traced with."""
    if isinstance(size, int):
        return size
    expr = size.node.expr
    if symbols is None:
        hint = size.node.hint if size.node.has_hint() else None
        if hint is not None:
            return int(hint)
        symbols = {}
    return int(expr.subs({s: symbols.get(s, _UNBACKED_SIZE) for s in expr.free_symbols}))


def shape_hint(node: fx.Node, symbols: Mapping[Any, int] | None = None) -> tuple[int, ...] | None:
    """The shape ``node`` was traced with, in numbers; None where it is no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    return tuple(size_hint(size, symbols) for size in value.shape)


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """The dtype ``node`` was traced with; None where it is no tensor."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def is_known_size(node: fx.Node) -> bool:
    """Whether ``node`` is an integer that shapes of the graph's inputs decide."""
    size = node.meta.get("val")
    return isinstance(size, int) or (isinstance(size, torch.SymInt) and size.node.has_hint())


def is_data_dependent(node: fx.Node) -> bool:
    """Whether ``node`` is a size, or has one, that only values decide."""
    size = node.meta.get("val")
    sizes = size.shape if isinstance(size, torch.Tensor) else (size,)
    return any(isinstance(s, torch.SymInt) and not s.node.has_hint() for s in sizes)


def _symbols(node: fx.Node) -> frozenset[Any]:
    """What the sizes of ``node``, or the size that it is, are made from."""
    size = node.meta.get("val")
    sizes = size.shape if isinstance(size, torch.Tensor) else (size,)
    return frozenset().union(*(s.node.expr.free_symbols for s in sizes if isinstance(s, torch.SymInt)))


def _is_size_of(node: fx.Node, symbols: frozenset[Any]) -> bool:
    """Whether ``node`` is a size that is made from ``symbols`` alone."""
    return isinstance(node.meta.get("val"), torch.SymInt) and _symbols(node) <= symbols


def cone(outputs: Sequence[fx.Node], stops: Sequence[fx.Node] | Mapping[fx.Node, Any]) -> list[fx.Node]:
    """Every node that ``outputs`` depend on up to and without ``stops``, inputs before users.

    Known sizes are leaves, and so are sizes that ``stops`` have: what they are the size of is no dependency.
    """
    given = frozenset().union(*map(_symbols, stops))
    order: list[fx.Node] = []
    seen = set(stops)
    stack = [(node, False) for node in reversed(outputs)]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            if not is_known_size(node) and not _is_size_of(node, given):
                stack.extend((source, False) for source in reversed(node.all_input_nodes))
    return order


def constant_value(node: fx.Node) -> torch.Tensor | None:
    """The tensor behind a ``get_attr`` node; None where the graph does not hold its value."""
    if node.op != "get_attr" or node.graph.owning_module is None:
        return None
    try:
        value = attrgetter(str(node.target))(node.graph.owning_module)
    except AttributeError:
        return None
    return value if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) else None


def evaluate(
    outputs: Sequence[fx.Node],
    feeds: Mapping[fx.Node, torch.Tensor],
    *,
    exact: bool = False,
    symbols: Mapping[Any, int] | None = None,
) -> list[torch.Tensor]:
    """The values of ``outputs`` when the nodes of ``feeds`` have the given values.

    Feeds may be smaller than the values they stand for; sizes then scale with them. ``symbols`` maps
    sympy symbols of dynamic sizes to numbers; without it sizes have the values they were traced with.

    Raises:
        NoMatch: a node cannot be run, or reads an input that is not fed; the message names it.
    """
    with isolated():
        probe = _Probe(feeds, exact, symbols)
        for node in cone(outputs, feeds):
            probe.run(node)
        values = [probe.values[node] for node in outputs]
    for node, value in zip(outputs, values, strict=True):
        if not isinstance(value, torch.Tensor):
            raise NoMatch("{} is no tensor", node, node=node)
    return values


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Plain eager torch on the CPU, whatever modes the compiler is in and whatever device is the default.

    A default device is a mode too. ``torch.device("cpu")`` would be one more, in Python, around every operation.
    """
    with unset_fake_temporarily(), torch.no_grad(), torch._C.DisableTorchFunction():
        yield


class _Probe:
    """One evaluation: the values so far, and how the graph's sizes map to the probe's."""

    def __init__(self, feeds: Mapping[fx.Node, torch.Tensor], exact: bool, symbols: Mapping[Any, int] | None) -> None:
        self.exact, self.symbols = exact, symbols
        self.values: dict[fx.Node, Any] = {node: self._neutral(value) for node, value in feeds.items()}
        self.resizing = any(tuple(value.shape) != shape_hint(node, symbols) for node, value in feeds.items())
        self.leading: dict[int, int] = {}
        """Traced to probed size of the feeds' first axes, for tensors that the graph makes from nothing."""
        for node, value in feeds.items():
            old = shape_hint(node, symbols)
            if old and value.dim() == len(old) and value.shape[0] != old[0]:
                self.leading[old[0]] = value.shape[0]

    def run(self, node: fx.Node) -> None:
        try:
            value = self._leaf(node) if node.op != "call_function" else self._call(node)
        except _EXECUTION_ERRORS as error:
            reason = str(error).partition("\n")[0]
            raise NoMatch("cannot evaluate {} ({}): {}", node, node.target, reason, node=node) from None
        self.values[node] = value

    def _neutral(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(map(self._neutral, value))
        if isinstance(value, torch.Tensor) and not self.exact and value.is_floating_point():
            return value.to(torch.float64)
        return value

    def _leaf(self, node: fx.Node) -> Any:
        size = node.meta.get("val")
        if isinstance(size, (int, torch.SymInt)):
            return size_hint(size, self.symbols)
        value = constant_value(node)
        if value is None:
            raise NoMatch("{} is an input that this piece should not read", node, node=node)
        return self._neutral(value.detach().to("cpu"))

    def _call(self, node: fx.Node) -> Any:
        if is_known_size(node) or (isinstance(node.meta.get("val"), torch.SymInt) and not self._has_inputs(node)):
            return size_hint(node.meta["val"], self.symbols)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            name, module = getattr(target, "__name__", ""), getattr(target, "__module__", None)
            if not callable(target) or (module not in _PURE_MODULES and not name.startswith("sym_")):
                raise NoMatch("{} calls {}, which is no ATen operation", node, target, node=node)
            return target(*args, **kwargs)
        if target.namespace not in _NAMESPACES and str(target) not in _GROUPED_MM:
            raise NoMatch("{} calls {}, which is no ATen operation", node, target, node=node)
        if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
            raise NoMatch("{} ({}) is random or changes its input", node, target, node=node)
        return self._aten(node, target, list(args), dict(kwargs))

    def _has_inputs(self, node: fx.Node) -> bool:
        return all(arg in self.values for arg in node.all_input_nodes)

    def _aten(self, node: fx.Node, target: torch._ops.OpOverload, args: list[Any], kwargs: dict[str, Any]) -> Any:
        name = op_name(target)
        resized = self.resizing and self._resized_inputs(node)
        if name in _VIEWS and target._overloadname != "dtype":
            if not self.resizing:
                return args[0].reshape(args[1])
            old_in, old_out = self._traced(node.all_input_nodes[0]), self._traced(node)
            new_in = tuple(args[0].shape)
            return args[0].reshape(regroup(old_in, new_in, old_out) if resized else old_out)
        if resized:
            check_resizable(target, args, kwargs, [self._traced_or_none(arg) for arg in node.args])
        if name == "expand":
            return args[0].expand(self._expanded(node, args[0]) if self.resizing else args[1])
        if not any(isinstance(arg, torch.Tensor) for arg in _flatten(args)):
            return self._factory(node, target, name, args, kwargs)
        kwargs = self._neutral_kwargs(kwargs)
        special = _SPECIAL.get(name)
        if name in ("convert_element_type", "_to_copy", "to"):
            return self._cast(node, args, kwargs)
        if name in _EMPTIES:
            return self._poisoned(node)
        if not self.exact:
            if name == "view":
                raise NoMatch("{} reinterprets the bits of a float", node, node=node)
            args = [torch.float64 if isinstance(arg, torch.dtype) and arg in WIDE_FLOATS else arg for arg in args]
            if special is not None:
                return self._neutral(special(*args, **kwargs))
        if str(target) in _GROUPED_MM:
            return grouped_mm(*args[:3], **{k: v for k, v in kwargs.items() if k in ("offs", "bias")})
        return self._neutral(target(*args, **kwargs))

    def _cast(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        value: torch.Tensor = args[0]
        dtype = dtype_of(node)
        if dtype is None:
            raise NoMatch("{} carries no dtype", node, node=node)
        if self.exact or not dtype.is_floating_point:
            return value.to(dtype)
        if dtype not in WIDE_FLOATS:
            raise NoMatch("{} rounds to {}", node, dtype, node=node)
        return value.to(torch.float64)

    def _factory(
        self, node: fx.Node, target: torch._ops.OpOverload, name: str, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        if name in _EMPTIES:
            return self._poisoned(node)
        kwargs = self._neutral_kwargs(kwargs)
        dtype, accepted = dtype_of(node), {arg.name for arg in target._schema.arguments}
        if "device" in accepted:
            kwargs["device"] = torch.device("cpu")
        if "dtype" in accepted and dtype is not None:
            kwargs["dtype"] = torch.float64 if dtype in WIDE_FLOATS and not self.exact else dtype
        if self.leading and name in ("full", "zeros", "ones"):
            args[0] = resize_leading(self._traced(node), self.leading)
        elif self.leading and any(size in self.leading for size in self._traced(node)):
            raise NoMatch("{} ({}) counts along an axis that the probe shortens", node, target, node=node)
        return self._neutral(target(*args, **kwargs))

    def _poisoned(self, node: fx.Node) -> torch.Tensor:
        """Uninitialised memory: a value that shows wherever it is read."""
        dtype = dtype_of(node) or torch.float32
        if dtype.is_floating_point and not self.exact:
            dtype = torch.float64
        poison = float("nan") if dtype.is_floating_point else 101
        return torch.full(resize_leading(self._traced(node), self.leading), poison, dtype=dtype)

    def _neutral_kwargs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory", "layout", "memory_format")}
        if not self.exact and kwargs.get("dtype") in WIDE_FLOATS:
            kwargs["dtype"] = torch.float64
        return kwargs

    def _expanded(self, node: fx.Node, value: torch.Tensor) -> list[int]:
        old_in, old_out = self._traced(node.all_input_nodes[0]), self._traced(node)
        sizes = list(resize_leading(old_out, self.leading))
        offset = len(old_out) - len(old_in)
        for axis, size in enumerate(old_in):
            if size == old_out[offset + axis]:
                sizes[offset + axis] = value.shape[axis]
        return sizes

    def _traced(self, node: fx.Node) -> tuple[int, ...]:
        shape = shape_hint(node, self.symbols)
        if shape is None:
            raise NoMatch("{} carries no shape", node, node=node)
        return shape

    def _traced_or_none(self, arg: Any) -> Any:
        """The traced shape in place of every node of an argument."""
        return fx.map_arg(arg, lambda node: shape_hint(node, self.symbols))

    def _resized_inputs(self, node: fx.Node) -> bool:
        return any(
            isinstance(self.values[source], torch.Tensor)
            and tuple(self.values[source].shape) != shape_hint(source, self.symbols)
            for source in node.all_input_nodes
        )


def grouped_mm(
    x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``y[offs[e-1]:offs[e]] = x[offs[e-1]:offs[e]] @ weight[e]`` in the inputs' dtype; other rows are NaN.

    Args:
        x: ``[S, K]``, rows sorted by expert (or ``[E, S, K]`` without ``offs``).
        weight: ``[E, K, N]``.
        offs: int32 ``[E]``, end of each expert's rows.

    Returns:
        ``[S, N]`` (``[E, S, N]`` without ``offs``).
    """
    if bias is not None:
        raise ValueError("a grouped GEMM with a fused bias")
    if offs is None:
        return torch.bmm(x, weight)
    if x.dim() != 2 or weight.dim() != 3:
        raise ValueError(f"a grouped GEMM of ranks {x.dim()} and {weight.dim()}")
    out = x.new_full((x.shape[0], weight.shape[-1]), float("nan"))
    start = 0
    for expert, end in enumerate(offs.tolist()):
        out[start:end] = x[start:end] @ weight[expert]
        start = end
    return out


def _histc(x: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.histc(x.to(torch.float64), *args).to(x.dtype)


_SPECIAL: dict[str, Callable[..., torch.Tensor]] = {
    # Kernels that a CPU lacks for float64 or int, and arguments that only choose a precision.
    "histc": _histc,
    "_softmax": lambda x, dim, half_to_float: torch.softmax(x, dim),
    "_log_softmax": lambda x, dim, half_to_float: torch.log_softmax(x, dim),
    "mm": lambda a, b, *_, **__: torch.mm(a, b),
    "bmm": lambda a, b, *_, **__: torch.bmm(a, b),
}


def _flatten(args: Sequence[Any]) -> Iterator[Any]:
    for arg in args:
        if isinstance(arg, (list, tuple)):
            yield from _flatten(arg)
        else:
            yield arg
