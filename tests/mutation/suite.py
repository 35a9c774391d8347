"""Graphs of real model code, mutated one thing at a time, and what recognition made of each mutant."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from capture import capture
from judge import REGIMES, TOLERANCE, NoRun, Role, draw, roles_of, worst_error
from models import hidden_states, moe_layers, pack_experts, tiny_model
from mutations import Mutation, NoGraph, mutations
from torch import fx, nn

from fp4_inductor.matching import Match, Recognition, find_matches, nodes_of
from fp4_inductor.spec import Operand

TOKENS = 16


@dataclass(frozen=True)
class Case:
    """One graph: ``layers`` blocks of a family."""

    family: str
    form: str
    fmt: str = "mxfp4"
    dynamic: bool = False
    layers: int = 1

    def __str__(self) -> str:
        sizes = "dynamic" if self.dynamic else "static"
        return f"{self.family}-{self.form}-{self.fmt}-{sizes}" + (f"-{self.layers}" if self.layers > 1 else "")


class Blocks(nn.Module):
    """The MoE layers of a model in a row, each behind a residual, with no norm that would level amplitudes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(moe_layers(model))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden ``[B, S, H]``; returns the same shape."""
        for layer in self.layers:
            out = layer(hidden)
            hidden = hidden + (out[0] if isinstance(out, tuple) else out)
        return hidden


@functools.cache
def _captured(case: Case) -> fx.GraphModule:
    model = tiny_model(case.family, layers=case.layers, experts_implementation=case.form)
    return capture(Blocks(pack_experts(model, case.fmt)), hidden_states(TOKENS), dynamic=case.dynamic)


class Subject:
    """A graph whose matches are true, and what is needed to judge its mutants."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.matches = find_matches(gm.graph).matches
        assert self.matches, "nothing is recognised in the graph that is to be mutated"
        self.roles: dict[str, Role | int] = roles_of(gm, self.matches)
        self.inputs = [draw(self.roles, regime, seed) for seed, regime in enumerate(REGIMES)]
        if error := self.error(gm, self.matches):
            raise AssertionError(f"the graph is not what it is taken for: {error}")
        self.mutations = list(mutations(gm.graph, region(self.matches)))

    @classmethod
    def of(cls, case: Case) -> Subject:
        return cls(_captured(case))

    def error(self, gm: fx.GraphModule, matches: Sequence[Match]) -> str:
        """What is wrong with ``matches`` of a mutant of the graph; empty where nothing is."""
        for regime, inputs in zip(REGIMES, self.inputs, strict=True):
            error = worst_error(gm, matches, inputs)
            if not error <= TOLERANCE:
                return f"{error:.2g} off with {regime.name} values"
        return ""

    def judge(self, mutation: Mutation, recognise: Callable[[fx.Graph], Recognition] = find_matches) -> Verdict:
        gm = copy.deepcopy(self.gm)
        try:
            mutation.make(gm)
        except NoGraph:
            return Verdict(mutation, "no graph")
        found = recognise(gm.graph)
        try:
            error = self.error(gm, found.matches)
        except NoRun:
            return Verdict(mutation, "no graph")
        if error:
            return Verdict(mutation, "wrong", error)
        if len(found.matches) == len(self.matches):
            return Verdict(mutation, "matched")
        return Verdict(mutation, "refused", self._unsaid(gm, found))

    def _unsaid(self, gm: fx.GraphModule, found: Recognition) -> str:
        """What is missing in the report of a refusal."""
        read = {node for match in found.matches for source in match.operands.values() for node in nodes_of(source)}
        codes = [node for node in gm.graph.find_nodes(op="placeholder") if self._is_codes(node) and node not in read]
        told = [miss.anchor.split()[0] for miss in found.near_misses]
        for node in codes:
            if node.name not in told:
                return f"{node.name} is in no match and no near miss"
        for miss in found.near_misses:
            if not miss.reason or not miss.where.file or not miss.packed_bytes:
                return f"{miss} says too little"
        return "" if any(miss.progress > 0 for miss in found.near_misses) else "no near miss came anywhere"

    def _is_codes(self, node: fx.Node) -> bool:
        role = self.roles[node.name]
        return isinstance(role, Role) and role.kind == "codes" and bool(node.users)


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: "no graph", "refused", "matched" with the right numbers, or "wrong"."""

    mutation: Mutation
    outcome: str
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.outcome}: {self.mutation}{': ' if self.problem else ''}{self.problem}"


def region(matches: Sequence[Match]) -> list[fx.Node]:
    """The nodes that the blocks' outputs depend on, from their hidden states on; hidden states included."""
    found: dict[fx.Node, None] = {}
    for match in matches:
        pending = [match.output]
        while pending:
            node = pending.pop()
            if node not in found:
                found[node] = None
                if node is not match.operands[Operand.HIDDEN]:
                    pending.extend(node.all_input_nodes)
    return list(found)


def sample(every: Sequence[Mutation], count: int, seed: int) -> Iterator[Mutation]:
    """``count`` mutations, as many of each kind as can be."""
    rng = Random(seed)
    by_kind: dict[str, list[Any]] = {}
    for mutation in every:
        by_kind.setdefault(mutation.kind, []).append(mutation)
    for group in by_kind.values():
        rng.shuffle(group)
    queues = sorted(by_kind.items())
    while count > 0 and queues:
        for kind, group in list(queues):
            if count > 0:
                yield group.pop()
                count -= 1
            if not group:
                queues.remove((kind, group))
