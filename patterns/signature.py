"""Identical layers are identified once: a key for what a piece of a graph computes, and a memo by it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import sympy
import torch
from torch import fx
from torch.utils._sympy.symbol import SymT, symbol_is_type

from ..matching import NoMatch
from .probing import constant_value, dtype_of, is_known_size, isolated

Result = TypeVar("Result")

_SMALL = 1 << 20
"""Constants up to this many elements are told apart by value, larger ones by name."""


class Memo:
    """Results by signature, for one ``find_matches`` call. Refusals are remembered too."""

    def __init__(self) -> None:
        self._results: dict[Hashable, Any] = {}

    def get(self, key: Hashable, compute: Callable[[], Result]) -> Result:
        """``compute()``, or what it gave or refused for this key before: then at no node, as that was another's."""
        if key not in self._results:
            try:
                self._results[key] = compute()
            except NoMatch as miss:
                self._results[key] = miss
                raise
        result = self._results[key]
        if isinstance(result, NoMatch):
            raise NoMatch(result.template, *result.format_args, progress=result.progress)
        return result  # type: ignore[no-any-return]


def signature(nodes: Sequence[fx.Node], inputs: int = 0) -> Hashable:
    """A key that two node lists share only if they compute the same function of their inputs.

    ``nodes`` stand in topological order; the first ``inputs`` of them are inputs, whatever computes them.
    Inputs enter by place, shape and dtype, constants by value, dynamic sizes by their formula, in which sizes that
    only values decide have new names in order of appearance.
    """
    return _Signature(nodes).of(inputs)


class _Signature:
    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.nodes = nodes
        self.index = {node: place for place, node in enumerate(nodes)}
        self.names: dict[sympy.Symbol, sympy.Symbol] = {}

    def of(self, inputs: int) -> Hashable:
        given = tuple(("input", self._shape(node), dtype_of(node)) for node in self.nodes[:inputs])
        return given + tuple(map(self._entry, self.nodes[inputs:]))

    def _entry(self, node: fx.Node) -> Hashable:
        about = (self._shape(node), dtype_of(node))
        if is_known_size(node):
            return ("size", self._size(node.meta["val"]))
        if node.op == "call_function":
            return (str(node.target), self._frozen(node.args), self._frozen(node.kwargs), about)
        value = constant_value(node)
        return (node.op, None if value is None else _content(node, value), about)

    def _frozen(self, value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            known = self.index.get(value)
            return ("node", (self._shape(value), dtype_of(value)) if known is None else known)
        if isinstance(value, (list, tuple)):
            return tuple(map(self._frozen, value))
        if isinstance(value, dict):
            return tuple((key, self._frozen(item)) for key, item in sorted(value.items()))
        return self._size(value) if isinstance(value, torch.SymInt) else repr(value)

    def _shape(self, node: fx.Node) -> Hashable:
        value = node.meta.get("val")
        return tuple(map(self._size, value.shape)) if isinstance(value, torch.Tensor) else None

    def _size(self, size: int | torch.SymInt) -> Hashable:
        """A size that two pieces share only if it is the same for every input."""
        if isinstance(size, int):
            return int(size)
        expr = size.node.expr
        if expr.is_Integer:
            return int(expr)
        for symbol in sorted(expr.free_symbols, key=str):
            if symbol_is_type(symbol, SymT.UNBACKED_INT):
                self.names.setdefault(symbol, sympy.Symbol(f"data{len(self.names)}"))
        return str(expr.xreplace(self.names))


def _content(node: fx.Node, value: torch.Tensor) -> Hashable:
    if value.numel() > _SMALL:
        return str(node.target)
    with isolated():
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.sha256(data.numpy().tobytes()).digest()
