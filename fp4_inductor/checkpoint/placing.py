"""Where each weight of a checkpoint belongs in the model, by transformers' own table of names.

transformers stacks and joins what older checkpoints keep apart (experts one by one, gate beside up). The table says
which operations make a parameter of which weights. Packed weights go through the same operations, on bytes: all of
them move whole rows, which stay whole in FP4.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import CheckpointError
from ..modules import gate_before_up
from .parts import some
from .weights import Fp4Weight, Weight, decoded, stacked


@dataclass(frozen=True, slots=True)
class Placement:
    """What fills one parameter or buffer, or several that one operation makes.

    Attributes:
        targets: their names in the model.
        patterns: those of transformers' table that named the weights, in its order; none where no operation is needed.
        sources: the weights, a group for each pattern.
        converter: transformers' ``WeightConverter``, None where the weight is taken as it is.
    """

    targets: tuple[str, ...]
    patterns: tuple[str, ...]
    sources: tuple[tuple[Weight, ...], ...]
    converter: Any

    @property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(weight for group in self.sources for weight in group)

    @property
    def operations(self) -> tuple[Any, ...]:
        return () if self.converter is None else tuple(self.converter.operations)

    @property
    def is_fp4(self) -> bool:
        return isinstance(self.weights[0], Fp4Weight)


def place(model: Any, weights: Iterable[Weight]) -> list[Placement]:
    """What fills each parameter of ``model``, in the order in which the model holds them.

    Raises:
        CheckpointError: weights that the model lacks, or that the checkpoint lacks.
    """
    names = _Names(model)
    order = {name: position for position, name in enumerate(names.expected)}
    grouped: dict[tuple[str, ...], dict[str, list[Weight]]] = defaultdict(lambda: defaultdict(list))
    unexpected: list[Weight] = []
    for weight in sorted(weights, key=lambda weight: _natural(weight.name)):
        targets, pattern = names.find(weight)
        if set(targets) <= names.expected.keys():
            grouped[targets][pattern].append(weight if pattern else _fitted(model, targets[0], weight))
        else:
            unexpected.append(weight)
    placements = [
        _placement(names, targets, by_pattern)
        for targets, by_pattern in sorted(grouped.items(), key=lambda item: order[item[0][0]])
    ]
    _check_names(model, names, placements, unexpected)
    for placement in placements:
        _check_sources(placement)
    return placements


class _Names:
    """transformers' renamings and converters for one model: what ``from_pretrained`` goes by."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        self.expected = dict(model.state_dict())
        self.prefix = model.base_model_prefix
        self.rename = rename_source_key
        table = get_model_conversion_mapping(model)
        self.renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
        self.converters = [entry for entry in table if isinstance(entry, WeightConverter)]
        self.converters += _expert_converters(model)
        self.of_pattern = {pattern: entry for entry in self.converters for pattern in entry.source_patterns}

    def find(self, weight: Weight) -> tuple[tuple[str, ...], str]:
        """Targets of a weight, and the pattern of its converter, "" where it has none."""
        target, pattern = self._target(weight.name, isinstance(weight, Fp4Weight))
        for spelling in () if target in self.expected else _respelled(weight.name):
            again, pattern_again = self._target(spelling, isinstance(weight, Fp4Weight))
            if again in self.expected:
                target, pattern = again, pattern_again
                break
        if pattern is None:
            return (target,), ""
        first, *others = self.of_pattern[pattern].target_patterns
        return (target, *(target.replace(first, other) for other in others)), pattern

    def _target(self, name: str, is_fp4: bool) -> tuple[str, str | None]:
        """Where a weight of this name belongs, or the new name that transformers gives what belongs nowhere."""
        found = self._renamed(name, self.renamings, self.converters)
        if found[0] in self.expected:
            return found
        ways: list[tuple[str, list[Any], list[Any]]] = [(name, [], self.converters), (name, [], [])]
        if is_fp4:
            # Fused experts are parameters of their own, and layouts that know only modules call them X.weight.
            ways.append((name.removesuffix(".weight"), self.renamings, self.converters))
            ways.append((name.removesuffix(".weight"), [], []))
        again = (self._renamed(*way) for way in ways)
        return next((way for way in again if way[0] in self.expected), found)

    def _renamed(self, name: str, renamings: list[Any], converters: list[Any]) -> tuple[str, str | None]:
        found: tuple[str, str | None] = self.rename(name, renamings, converters, self.prefix, self.expected)
        return found


_SPELLINGS = (
    (r"\.experts\.(\w+_proj|w[123])s?\.(\d+)\.", r".experts.\2.\1."),
    (r"\.(router|gate)\.linear\.", r".\1."),
    (r"\.moe\.experts\.", ".experts."),
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"(\blanguage_model\.){2,}", "language_model."),
)
"""Names of exporters that take a model's modules apart, or wrap them: projections before experts, text models twice."""


def _respelled(name: str) -> Iterator[str]:
    """``name`` with each of these spellings undone, then with all."""
    undone = name
    for pattern, replacement in _SPELLINGS:
        undone = re.sub(pattern, replacement, undone)
        yield re.sub(pattern, replacement, name)
    yield undone


def _expert_converters(model: Any) -> list[Any]:
    """How experts that a file keeps one by one are stacked, also in models that transformers' table says nothing of.

    Exporters write them so for every model. What a class does not say, the order of gate and up, is not guessed.
    """
    from transformers.core_model_loading import Concatenate, Interleave, MergeModulelist, WeightConverter

    orders = {gate_before_up(module) for module in model.modules() if "gate_up_proj" in module._parameters}
    orders.discard(None)
    if len(orders) != 1:
        return []
    alternate = [] if orders.pop() else [Interleave(dim=1, inverse=True)]
    converters = []
    for kind, ending in (("weight", ""), ("bias", "_bias")):
        whole = rf"\.experts\.\d+\.gate_up_proj\.{kind}$"
        converters.append(WeightConverter(whole, f".experts.gate_up_proj{ending}", [MergeModulelist(dim=0)]))
    for gate, up, down in (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")):
        for kind, ending in (("weight", ""), ("bias", "_bias")):
            pair, one = [[rf"\.experts\.\d+\.{name}\.{kind}$" for name in names] for names in ((gate, up), (down,))]
            join = [MergeModulelist(dim=0), Concatenate(dim=1), *alternate]
            converters.append(WeightConverter(pair, f".experts.gate_up_proj{ending}", join))
            converters.append(WeightConverter(one, f".experts.down_proj{ending}", [MergeModulelist(dim=0)]))
    return converters


def _fitted(model: Any, target: str, weight: Weight) -> Weight:
    """The weight as its module takes it: experts taken from under one another, an embedding and its twin decoded."""
    path, _, name = target.rpartition(".")
    module = model.get_submodule(path)
    parameter = module._parameters.get(name)
    if not isinstance(weight, Fp4Weight) or parameter is None:
        return weight
    tied = model.all_tied_weights_keys
    if isinstance(module, nn.Embedding) or target in tied or target in tied.values():
        return decoded(weight, parameter.dtype)
    if len(weight.shape) == 2 and parameter.dim() == 3:
        return stacked(weight, parameter.shape[0])
    return weight


def _placement(names: _Names, targets: tuple[str, ...], by_pattern: dict[str, list[Weight]]) -> Placement:
    if "" in by_pattern:
        return Placement(targets, (), tuple(tuple(group) for group in by_pattern.values()), None)
    converter = names.of_pattern[next(iter(by_pattern))]
    patterns = tuple(pattern for pattern in converter.source_patterns if pattern in by_pattern)
    groups = tuple(tuple(by_pattern[pattern]) for pattern in patterns)
    return Placement(targets, patterns, groups, copy.deepcopy(converter))


def _check_sources(placement: Placement) -> None:
    weights = placement.weights
    where = placement.targets[0]
    if placement.converter is None and len(weights) > 1:
        names = sorted(key for weight in weights for key in weight.keys)
        raise CheckpointError("placing weights", needed=f"one source of {where}", got=some(names), where=where)
    kinds = {weight.format.name if isinstance(weight, Fp4Weight) else "unquantised" for weight in weights}
    if len(kinds) > 1:
        raise CheckpointError(
            "placing weights",
            needed="one format for all weights that the model keeps in one parameter",
            got=" and ".join(sorted(kinds)),
            where=where,
            now="quantise the experts of a layer, and gate and up of each, alike",
        )


def _check_names(model: Any, names: _Names, placements: Sequence[Placement], unexpected: list[Weight]) -> None:
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    left = sorted(
        key
        for weight in unexpected
        for key in weight.keys
        if not any(re.search(pattern, weight.name) for pattern in ignored)
    )
    missing = names.expected.keys() - {target for placement in placements for target in placement.targets}
    tied = model.all_tied_weights_keys
    partners = {**tied, **{source: target for target, source in tied.items()}}
    missing -= {name for name in missing if partners.get(name, name) not in missing}
    if left or missing:
        raise CheckpointError(
            "matching the checkpoint with the model",
            needed="the same weights in both",
            got=f"missing: {some(sorted(missing))}; unexpected: {some(left)}",
        )


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts numbers in a name by value: the order in which transformers stacks experts."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
