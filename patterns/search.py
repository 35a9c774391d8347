"""Find every MoE block of a graph, and say of every FP4 weight that is in none how far recognition came."""

from __future__ import annotations

import logging
from dataclasses import replace

import sympy
import torch
from torch import fx

from ..matching import Match, NoMatch, Recognition, Source, nodes_of
from ..spec import GivenRouting, MoESpec, Operand, RouterSpec, TokenRange
from . import dense, expert_loop, routed_rows
from .block import Block, Candidate
from .grains import global_grain
from .graph_tools import dtype, location, num_elements, numel, same, shape, stage, tensor
from .linear_layers import linear_layers
from .near_misses import Misses
from .packed import packed_gemms, packed_roots
from .proof import prove
from .region import check_region, dying
from .router import identify_router
from .signature import Memo
from .writes import Writes

logger = logging.getLogger(__name__)

_UNBOUNDED = 1 << 60


FORMS = (routed_rows.candidates, dense.candidates, expert_loop.candidates)
"""Each gives the blocks that could be of its form. A GEMM is of the first block that is read."""


def search(graph: fx.Graph) -> Recognition:
    """Every block in graph order, and a near miss for every packed weight that no block reads.

    A block without tokens computes nothing: it is neither.
    """
    roots = packed_roots(graph)
    every = packed_gemms(graph, roots)
    reads = {gemm: found for gemm, found in every.items() if tensor(gemm) is None or not same(numel(gemm), 0)}
    idle = frozenset().union(*every.values()).difference(*reads.values())
    misses, memo, writes = Misses(reads), Memo(), Writes(graph)
    for gemm in reads:
        misses.keep(
            "none", NoMatch("{} is a GEMM of one weight, not of one for each expert", gemm.target, node=gemm), gemm
        )
    matches: list[Match] = []
    lowered: set[fx.Node] = set()
    for form in FORMS:
        for candidate in form(list(reads), misses):
            if not lowered.isdisjoint(candidate.gemms):
                continue
            try:
                matches.append(_match(candidate, memo, writes))
                lowered.update(candidate.gemms)
            except NoMatch as miss:
                for gemm in candidate.gemms:
                    misses.keep(candidate.form, miss, gemm)
    matched = {node for match in matches for source in match.operands.values() for node in nodes_of(source)}
    order = {node: place for place, node in enumerate(graph.nodes)}
    matches.sort(key=lambda match: order[match.output])
    left = [root for root in roots if root not in matched | idle]
    layers = linear_layers(reads, left, {match.output for match in matches})
    return Recognition(
        tuple(matches),
        misses.report(root for root in left if root not in layers),
        misses.report_layers(root for root in left if root in layers),
    )


def _match(candidate: Candidate, memo: Memo, writes: Writes) -> Match:
    block = candidate.read(memo)
    with stage(0.8):
        check_region(block)
    with stage(0.9):
        prove(block, memo)
    match = _described(block, memo)
    writes.check(match)
    return match


def _described(block: Block, memo: Memo) -> Match:
    router, routing = _router(block, memo)
    operands: dict[Operand, Source | None] = {
        Operand.HIDDEN: block.hidden,
        Operand.TOPK_IDS: block.ids,
        Operand.TOPK_WEIGHTS: block.weights,
        Operand.W13: block.w13.codes,
        Operand.W13_SCALE: block.w13.scale,
        Operand.W13_GLOBAL: block.w13.global_scale,
        Operand.W13_BIAS: block.w13_bias,
        Operand.W2: block.w2.codes,
        Operand.W2_SCALE: block.w2.scale,
        Operand.W2_GLOBAL: block.w2.global_scale,
        Operand.W2_BIAS: block.w2_bias,
        **block.scalars,
        **routing,
    }
    present = {operand: source for operand, source in operands.items() if source is not None}
    experts, _, width = block.w13.shape
    spec = MoESpec(
        num_experts=experts,
        top_k=block.top_k,
        hidden_size=width,
        intermediate_size=block.w2.shape[2],
        weight_format=block.w13.format,
        activation=block.activation,
        act_dtype=dtype(block.hidden),
        weights_dtype=block.weights_dtype or dtype(nodes_of(block.weights)[0]),
        out_dtype=dtype(block.output),
        num_tokens=_token_range(num_elements(shape(block.hidden)[:-1])),
        router=router,
        w13_order=block.order,
        weights_transposed=block.k_first,
        has_w13_bias=block.w13_bias is not None,
        has_w2_bias=block.w2_bias is not None,
        w13_global=global_grain(block.w13, block.order if block.activation.gated else None),
        w2_global=global_grain(block.w2),
        weight_on_input=block.weight_on_input,
    )
    return Match(
        pattern=block.form,
        grade="full" if isinstance(router, RouterSpec) else "experts",
        spec=spec,
        output=block.output,
        nodes=dying(block.output, [node for source in present.values() for node in nodes_of(source)]),
        operands=present,
        where=location(block.output),
    )


def _router(block: Block, memo: Memo) -> tuple[RouterSpec | GivenRouting, dict[Operand, Source]]:
    """The router where it is recognised. A block never fails for its router."""
    if block.weight_on_input:
        return GivenRouting(), {}  # kernels that route inside weigh what comes out
    try:
        weights = nodes_of(block.weights)[0]  # or a matrix of scores, read at the ids
        found = identify_router(block.ids, weights, block.w13.shape[0], block.top_k, memo)
    except NoMatch as miss:
        logger.debug("%s: routing is taken as given: %s", location(block.output), miss)
        return GivenRouting(), {}
    rounded = dtype(weights)  # before they are read as what they multiply in
    if torch.finfo(rounded).eps > torch.finfo(block.weights_dtype or rounded).eps:
        return replace(found.spec, dtype=rounded), dict(found.operands)
    return found.spec, dict(found.operands)


def _token_range(size: int | torch.SymInt) -> TokenRange:
    if isinstance(size, int):
        return TokenRange(size, size)
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    lower, upper = (int(b) if isinstance(b, sympy.Integer) else None for b in (bounds.lower, bounds.upper))
    return TokenRange(lower or 0, None if upper is None or upper >= _UNBOUNDED else upper)
