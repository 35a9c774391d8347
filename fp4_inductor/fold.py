"""Weight re-layout as constants that stay true.

``fold`` cuts the re-layout sub-graphs that ``emit`` wrote (recipes) out of a graph and gives the graph
their results as extra static inputs. Values never enter a compiled artefact: a recipe runs on the
weights that a call brings, once per weight, and its result is kept beside that weight for as long as
the weight lives and is unchanged. So one compiled graph serves many models, a warm compile cache
serves other weights, and in-place updates are seen.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from tqdm import tqdm

from .emit import PREPARED
from .host_memory import move_to_host
from .layouts.huge_pages import to_huge_pages

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Recipe:
    """A prepared tensor as a function of weights.

    Attributes:
        key: text of the function; equal keys compute the same from the same tensors.
        function: sources to prepared tensor.
        sources: indices into the arguments of the unfolded graph.
    """

    name: str
    key: str
    function: fx.GraphModule
    sources: tuple[int, ...]


@dataclass(frozen=True)
class Folding:
    """How a folded graph's inputs come from the unfolded graph's: kept ones, then one per recipe."""

    kept: tuple[int, ...]
    recipes: tuple[Recipe, ...]
    example_inputs: tuple[Any, ...]
    static_input_idxs: tuple[int, ...]


def fold(gm: fx.GraphModule, example_inputs: Sequence[Any], static_input_idxs: Iterable[int]) -> Folding:
    """Turn the prepared nodes of ``gm`` into placeholders, in place.

    A re-layout that reads anything but static inputs stays in the graph.

    Args:
        gm: graph with nodes marked by ``emit``.
        example_inputs: fake inputs, in placeholder order.
        static_input_idxs: inputs whose storage outlives the call (parameters, buffers).
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    index = {node: i for i, node in enumerate(placeholders)}
    static = set(static_input_idxs)
    recipes: list[Recipe] = []
    folded: dict[tuple[str, tuple[int, ...]], fx.Node] = {}
    for node in _outermost(gm.graph):
        recipe = _cut_recipe(node, index)
        if recipe is None or not static.issuperset(recipe.sources):
            continue
        if (recipe.key, recipe.sources) not in folded:
            name = f"{PREPARED}_{len(recipes)}_{recipe.name}"
            folded[recipe.key, recipe.sources] = _add_placeholder(gm.graph, name, node)
            recipes.append(recipe)
        node.replace_all_uses_with(folded[recipe.key, recipe.sources])
    gm.graph.eliminate_dead_code()
    unused = {index[n] for n in placeholders if not n.users and index[n] in static}
    dropped = {i for recipe in recipes for i in recipe.sources} & unused
    for i in dropped:
        gm.graph.erase_node(placeholders[i])
    gm.graph.lint()
    gm.recompile()
    kept = tuple(i for i in range(len(placeholders)) if i not in dropped)
    new_inputs = [node.meta["val"] for node in folded.values()]
    return Folding(
        kept=kept,
        recipes=tuple(recipes),
        example_inputs=tuple([example_inputs[i] for i in kept] + new_inputs),
        static_input_idxs=tuple(
            [j for j, i in enumerate(kept) if i in static] + list(range(len(kept), len(kept) + len(recipes)))
        ),
    )


def _outermost(graph: fx.Graph) -> list[fx.Node]:
    """The prepared nodes that something else than another re-layout reads, in graph order."""
    needed: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.is_impure() or any(user in needed and PREPARED not in user.meta for user in node.users):
            needed.add(node)
    return [node for node in graph.nodes if node in needed and PREPARED in node.meta]


def _cut_recipe(node: fx.Node, index: dict[fx.Node, int]) -> Recipe | None:
    """The sub-graph that computes ``node`` from placeholders, under canonical names."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    sources: list[int] = []
    for member in _topological_cone(node):
        if member.op == "placeholder":
            env[member] = graph.placeholder(f"weight_{len(sources)}")
            sources.append(index[member])
        elif not isinstance(member.target, str):
            args = fx.map_arg(member.args, env.__getitem__)
            kwargs = fx.map_arg(member.kwargs, env.__getitem__)
            env[member] = graph.call_function(member.target, args, kwargs)
        else:
            return None
    graph.output(env[node])
    # Placeholders first: the text is a key, and a function's arguments precede its body.
    for position, source in enumerate(graph.find_nodes(op="placeholder")):
        assert source.target == f"weight_{position}"
    return Recipe(node.meta[PREPARED], str(graph), fx.GraphModule({}, graph), tuple(sources))


def _topological_cone(node: fx.Node) -> list[fx.Node]:
    """Every ancestor of ``node`` and itself, placeholders first, in an order that depends only on structure."""
    order: list[fx.Node] = []
    seen: set[fx.Node] = set()
    stack = [(node, False)]
    while stack:
        current, done = stack.pop()
        if done:
            order.append(current)
        elif current not in seen:
            seen.add(current)
            stack.append((current, True))
            stack += [(parent, False) for parent in reversed(current.all_input_nodes)]
    return sorted(order, key=lambda member: member.op != "placeholder")


def _add_placeholder(graph: fx.Graph, name: str, like: fx.Node) -> fx.Node:
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        node = graph.placeholder(name)
    node.meta["val"] = like.meta["val"]
    return node


class PreparedWeight:
    """The result of one recipe on one set of weights."""

    __slots__ = ("_sources", "_stamps", "value")

    def __init__(self, recipe: Recipe, sources: Sequence[torch.Tensor], forget: Callable[[object], None]) -> None:
        self._sources = [weakref.ref(source, forget) for source in sources]
        self._stamps = [stamp(source) for source in sources]
        with torch.inference_mode(False), torch.no_grad():
            value = to_huge_pages(recipe.function(*sources))
            # An alias of its source would outlive it, and would be counted twice.
            storage = value.untyped_storage().data_ptr()
            aliases = any(storage == source.untyped_storage().data_ptr() for source in sources)
            self.value: torch.Tensor | None = value.clone() if aliases else value

    def moved(self, source: torch.Tensor, old: tuple[int, int]) -> None:
        """Take the stamp that ``source`` has now for what ``old`` said: its bytes are the same elsewhere."""
        same = [ref() is source and seen == old for ref, seen in zip(self._sources, self._stamps, strict=True)]
        self._stamps = [stamp(source) if s else seen for s, seen in zip(same, self._stamps, strict=True)]

    def is_current(self, sources: Sequence[torch.Tensor]) -> bool:
        return self.value is not None and all(
            ref() is source and old == stamp(source)
            for ref, source, old in zip(self._sources, sources, self._stamps, strict=True)
        )


def stamp(tensor: torch.Tensor) -> tuple[int, int]:
    """Changes with every in-place update, ``load_state_dict`` and ``.data =`` that can be seen from outside.

    ``param.data.copy_(...)`` cannot: it bumps no version and moves no storage, nor can an update of a tensor
    made under ``torch.inference_mode()``, which has no version.
    """
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()


class PreparedWeights:
    """All prepared weights of the process, shared by every compiled graph."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, tuple[int, ...]], PreparedWeight] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, recipe: Recipe, sources: Sequence[torch.Tensor]) -> PreparedWeight:
        """The recipe's result on ``sources``: kept, or made now."""
        key = (recipe.key, tuple(map(id, sources)))
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or not entry.is_current(sources):
                self._forget(key)  # free the stale copy before the new one is made
                entry = self._entries[key] = PreparedWeight(recipe, sources, lambda _: self._forget(key))
            return entry

    def release(self, source: torch.Tensor) -> str:
        """Move an original to host memory, and keep what was prepared from it; why not, if it stays."""
        with self._lock:
            old = stamp(source)
            why_not = move_to_host(source)
            for (_, ids), entry in list(self._entries.items()):
                if id(source) in ids:
                    entry.moved(source, old)
            return why_not

    def _forget(self, key: tuple[str, tuple[int, ...]]) -> None:
        """Drop the bytes too: compiled graphs hold on to entries, and must not keep a dead model's weights."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            entry.value = None


PREPARED_WEIGHTS = PreparedWeights()


class FoldedCall:
    """A compiled folded graph, callable with the arguments of the unfolded one.

    Args:
        first_call: is given the first call's arguments, before they are used.
        release_originals: move weights that only re-layouts read to host memory, each as soon as they have run.
    """

    _boxed_call = True

    def __init__(
        self,
        folding: Folding,
        compiled: Callable[[list[Any]], Any],
        first_call: Callable[[Sequence[Any]], None] | None = None,
        *,
        release_originals: bool = False,
    ) -> None:
        self._first_call = first_call
        self._kept, self._recipes, self._compiled = folding.kept, folding.recipes, compiled
        last_reader = {i: recipe for recipe in folding.recipes for i in recipe.sources}
        self._sources = sorted(last_reader)
        self._released = {
            recipe: [i for i, last in last_reader.items() if last is recipe and i not in folding.kept]
            for recipe in (folding.recipes if release_originals else ())
        }
        self._last = _Prepared((), ())

    def __call__(self, args: list[Any]) -> Any:
        if self._first_call is not None:
            self._first_call(args)
            self._first_call = None
        last = self._last
        if not last.is_current([args[i] for i in self._sources]):
            last = self._prepare(args)
        inputs = [args[i] for i in self._kept]
        inputs += [entry.value for entry in last.entries]
        args.clear()
        return self._compiled(inputs)

    def _prepare(self, args: list[Any]) -> _Prepared:
        self._last = _Prepared((), ())
        # One recipe at a time, so that the peak above the prepared weights is one weight's temporaries.
        bar = tqdm(self._recipes, desc="preparing FP4 weights", unit="tensor", disable=None, delay=2, leave=False)
        start = time.perf_counter()
        entries = []
        left: dict[str, int] = {}
        for recipe in bar:
            entries.append(PREPARED_WEIGHTS.get(recipe, [args[i] for i in recipe.sources]))
            for i in self._released.get(recipe, ()):
                if why_not := PREPARED_WEIGHTS.release(args[i]):
                    left[why_not] = left.get(why_not, 0) + args[i].nbytes
        for why_not, num_bytes in left.items():
            logger.warning("%d bytes of original weights are not released: %s", num_bytes, why_not)
        logger.info("%d prepared weights are ready after %.2f s", len(entries), time.perf_counter() - start)
        seen = tuple((weakref.ref(args[i]), stamp(args[i])) for i in self._sources)
        self._last = _Prepared(seen, tuple(entries))
        return self._last


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The weights of a call and what was prepared from them. Replaced whole, so that threads may share it."""

    seen: tuple[tuple[weakref.ref[torch.Tensor], tuple[int, int]], ...]
    entries: tuple[PreparedWeight, ...]

    def is_current(self, weights: Sequence[torch.Tensor]) -> bool:
        """The path of every call but the first."""
        if len(self.seen) != len(weights):
            return False
        for (ref, old), weight in zip(self.seen, weights, strict=True):
            if ref() is not weight or old != stamp(weight):
                return False
        return True
