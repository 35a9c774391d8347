"""A small copy of a region: the same operations at sizes that a probe can afford.

Sizes are renamed all over: where the graph says H, the copy says 32. That is what tracing the same
model with smaller hyperparameters would give; expert count and top-k stay as they are. A graph in which
one number means two things that cannot both be renamed keeps more of its own sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..matching import NoMatch
from ..spec import Operand
from .graph_tools import is_size, shape
from .probing import cone, constant_value, is_data_dependent, isolated, size_hint

_SIZE_ARGUMENTS = frozenset(
    {"size", "shape", "sizes", "length", "split_size", "split_sizes", "start", "end", "output_size"}
)
"""Arguments that are sizes. What else is a number in a graph keeps its value."""

_PER_TOKEN = frozenset(map(str, (Operand.HIDDEN, Operand.TOPK_IDS, Operand.TOPK_WEIGHTS)))

_WIDTHS = tuple(range(32, 256, 16))
"""Multiples of 16, which grouped GEMMs ask for."""
_TOKENS = (*range(5, 32), *_WIDTHS)
_MAX_PRODUCTS = 1 << 27
"""Multiplications of a GEMM; a probe beyond that would stall a compilation."""

_EXECUTION_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AssertionError)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a block; one of ``branches`` may merge with others in one dimension."""

    tokens: int
    top_k: int
    experts: int
    hidden: int
    intermediate: int
    branches: int = 0


@dataclass(frozen=True, slots=True)
class Miniature:
    """A region at small sizes.

    Attributes:
        output: stands for the region's output, in a graph of its own.
        feeds: the copy of each feed, under the feed's name.
        sizes: the copy's.
    """

    output: fx.Node
    feeds: Mapping[Any, fx.Node]
    sizes: Sizes


def miniature(output: fx.Node, feeds: Mapping[fx.Node, Any], sizes: Sizes, symbols: Mapping[Any, int]) -> Miniature:
    """Copy the region from ``feeds`` to ``output`` at the smallest sizes that can be told apart.

    Args:
        sizes: what the region's sizes are once its dynamic ones have the values of ``symbols``.

    Raises:
        NoMatch: an operation of the region does not run at other sizes.
    """
    in_batches = any(len(shape(feed)) > 2 for feed, name in feeds.items() if str(name) in _PER_TOKEN)
    if symbols or in_batches:
        return _copied(output, feeds, sizes, symbols, shrink_tokens=False)
    try:
        return _copied(output, feeds, sizes, symbols, shrink_tokens=True)
    except NoMatch:  # it may cut tokens into batches on the way
        return _copied(output, feeds, sizes, symbols, shrink_tokens=False)


def _copied(
    output: fx.Node, feeds: Mapping[fx.Node, Any], sizes: Sizes, symbols: Mapping[Any, int], *, shrink_tokens: bool
) -> Miniature:
    renamed, names = _rename(sizes, shrink_tokens=shrink_tokens)
    nodes = cone([output], feeds)
    device = "cpu" if any(map(is_data_dependent, nodes)) else "meta"
    copier = _Copier(names, symbols, output.graph, device, sizes.experts)
    with isolated():
        for feed, name in feeds.items():
            copier.feed(feed, str(name))
        for node in nodes:
            copier.copy(node)
    copies = {name: copier.copies[feed] for feed, name in feeds.items()}
    return Miniature(copier.copies[output], copies, renamed)


def small_symbols(feeds: Iterable[fx.Node]) -> dict[Any, int]:
    """A small value for every symbol in the sizes of ``feeds``."""
    symbols = {
        s for feed in feeds for size in shape(feed) if not isinstance(size, int) for s in size.node.expr.free_symbols
    }
    return dict.fromkeys(symbols, _TOKENS[0])


def _rename(old: Sizes, *, shrink_tokens: bool) -> tuple[Sizes, dict[int, int]]:
    """The smallest sizes to which a one-to-one map of numbers leads, and the map.

    Raises:
        NoMatch: they are not small.
    """
    fixed = {0, 1, old.top_k, old.experts, old.experts - 1}

    def choices(size: int, smaller: tuple[int, ...]) -> list[int]:
        return [size] if size in fixed else [*(s for s in smaller if s < size), size]

    tokens = choices(old.tokens, _TOKENS) if shrink_tokens else [old.tokens]
    for t, h, i in itertools.product(tokens, choices(old.hidden, _WIDTHS), choices(old.intermediate, _WIDTHS)):
        new = Sizes(t, old.top_k, old.experts, h, i, old.branches)
        pairs = {*((n, n) for n in fixed), *zip(_numbers(old), _numbers(new), strict=True)}
        if len({a for a, _ in pairs}) == len({b for _, b in pairs}) == len(pairs):
            if t * max(new.top_k, new.branches) * h * i > _MAX_PRODUCTS:
                break
            return new, dict(pairs)
    raise NoMatch("its sizes {} cannot be told apart at a scale that can be probed", old)


def _numbers(sizes: Sizes) -> tuple[int, ...]:
    tokens, width, inner = sizes.tokens, sizes.hidden, sizes.intermediate
    plain = (tokens, tokens * sizes.top_k, width, inner, 2 * inner)
    merged = (sizes.branches * size for size in (tokens, width, inner, 2 * inner) if sizes.branches)
    return (*plain, *merged)


class _Copier:
    """Copies nodes with sizes renamed; each copy carries its value's shape and dtype."""

    def __init__(
        self, names: Mapping[int, int], symbols: Mapping[Any, int], original: fx.Graph, device: str, experts: int
    ) -> None:
        """On the "cpu" feeds have values, for regions with sizes that only values decide."""
        self.names, self.symbols, self.device, self.experts = names, symbols, device, experts
        self.graph = fx.Graph()
        self.graph.owning_module = original.owning_module
        self.copies: dict[fx.Node, Any] = {}
        self.counted: dict[fx.Node, Any] = {}
        """Sizes that values decided."""

    def feed(self, node: fx.Node, name: str) -> None:
        copy = self.graph.placeholder(name)
        value: torch.Tensor = node.meta["val"]
        made = torch.zeros([self._size(s) for s in value.shape], dtype=value.dtype, device=self.device)
        if self.device == "cpu" and not value.dtype.is_floating_point:
            made = (torch.arange(made.numel()) % self.experts).to(value.dtype).reshape(made.shape)
        copy.meta["val"] = made
        self.copies[node] = copy

    def copy(self, node: fx.Node) -> None:
        if is_size(node) and not is_data_dependent(node):
            self.copies[node] = self._size(node.meta["val"])
        elif node.op == "call_function":
            args, kwargs = self._arguments(node)
            copy = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
            if is_size(node):  # its copy carries none, so that every run computes it
                self.counted[copy] = self._run(copy)
            else:
                copy.meta["val"] = self._run(copy)
            self.copies[node] = copy
        else:
            self.copies[node] = self.graph.node_copy(node)

    def _size(self, size: int | torch.SymInt) -> int:
        if isinstance(size, torch.SymInt) and size.node.expr.free_symbols:
            return size_hint(size, self.symbols)
        number = size_hint(size)
        return self.names.get(number, number)

    def _arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        schema = getattr(node.target, "_schema", None)
        names = [argument.name for argument in schema.arguments] if schema is not None else []
        args = [
            self._sized(arg) if name in _SIZE_ARGUMENTS else arg
            for name, arg in itertools.zip_longest(names[: len(node.args)], node.args)
        ]
        kwargs = {name: self._sized(arg) if name in _SIZE_ARGUMENTS else arg for name, arg in node.kwargs.items()}
        return fx.map_arg((tuple(args), kwargs), self.copies.__getitem__)

    def _sized(self, arg: Any) -> Any:
        if isinstance(arg, list | tuple):
            return [self._sized(item) for item in arg]
        return self.names.get(arg, arg) if isinstance(arg, int) else arg

    def _value(self, copy: fx.Node) -> Any:
        if copy in self.counted:
            return self.counted[copy]
        return constant_value(copy) if copy.op == "get_attr" and self.device == "cpu" else copy.meta["val"]

    def _run(self, copy: fx.Node) -> Any:
        args, kwargs = fx.map_arg((copy.args, copy.kwargs), self._value)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self.device}
        try:
            return copy.target(*args, **kwargs)  # type: ignore[operator]
        except _EXECUTION_ERRORS as error:
            reason = str(error).partition("\n")[0]
            raise NoMatch("{} does not run at other sizes: {}", copy.name, reason) from None
