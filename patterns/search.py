"""Find every MoE block of a graph, and say of every FP4 weight that is in none how far recognition came."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import sympy
import torch
from torch import fx

from ..matching import Match, NearMiss, NoMatch, Recognition
from ..spec import GivenRouting, MoESpec, Operand, RouterSpec, TokenRange
from .batched_mm import NAME as BATCHED_MM
from .batched_mm import read_batched_mm
from .block import Block, read_block
from .gemm import ExpertGemm
from .graph_tools import aten, dtype, is_call, is_size, location, numel, same, shape, stage, tensor
from .grouped_mm import NAME as GROUPED_MM
from .grouped_mm import operands as grouped_operands
from .grouped_mm import read_grouped_mm
from .packed import packed_gemms, packed_roots
from .proof import prove
from .region import check_region, dying
from .router import identify_router
from .signature import Memo

logger = logging.getLogger(__name__)

_UNBOUNDED = 1 << 60


class _Misses:
    """The furthest refusal of every packed weight."""

    def __init__(self) -> None:
        self.by_root: dict[fx.Node, tuple[str, NoMatch, fx.Node]] = {}

    def keep(self, pattern: str, miss: NoMatch, gemm: fx.Node, roots: Iterable[fx.Node]) -> None:
        for root in roots:
            kept = self.by_root.get(root)
            if kept is None or miss.progress > kept[1].progress:
                self.by_root[root] = (pattern, miss, gemm)

    def report(self, roots: Iterable[fx.Node]) -> tuple[NearMiss, ...]:
        return tuple(self._near_miss(root) for root in roots)

    def _near_miss(self, root: fx.Node) -> NearMiss:
        pattern, miss, gemm = self.by_root.get(root) or ("none", _no_gemm(root), next(iter(root.users)))
        where = location(miss.node) if miss.node is not None else location(gemm)
        val = tensor(root)
        assert val is not None
        return NearMiss(
            anchor=f"{root.name} {str(val.dtype).removeprefix('torch.')}{list(val.shape)}",
            pattern=pattern,
            reason=str(miss),
            progress=miss.progress,
            packed_bytes=val.numel(),
            where=where if where.file else location(gemm),
        )


def _no_gemm(root: fx.Node) -> NoMatch:
    """Why no GEMM was found behind a packed weight."""
    seen = {root}
    pending = [root]
    while pending:
        node = pending.pop()
        for reader in node.users:
            if reader.op == "output" and tensor(node) is not None and same(numel(node), 2 * numel(root)):
                return NoMatch("its values leave the graph before a GEMM: a graph break, as in a loop over experts")
            if reader not in seen:
                seen.add(reader)
                pending.append(reader)
    return NoMatch("no GEMM that could be an expert's reads it")


def search(graph: fx.Graph) -> Recognition:
    """Every block in graph order, and a near miss for every packed weight that no block reads.

    A block without tokens computes nothing: it is neither.
    """
    roots = packed_roots(graph)
    every = packed_gemms(graph, roots)
    reads = {gemm: found for gemm, found in every.items() if tensor(gemm) is None or not same(numel(gemm), 0)}
    idle = frozenset().union(*every.values()).difference(*reads.values())
    misses, memo = _Misses(), Memo()
    gemms = _read_gemms(reads, misses)
    matches: list[Match] = []
    for down in gemms.values():
        ups = _behind(down, gemms)
        if not ups:
            continue
        try:
            matches.append(_match(ups, down, memo))
        except NoMatch as miss:
            for gemm in (*ups, down):
                misses.keep(down.form, miss, gemm.node, reads[gemm.node])
    matched = {node for match in matches for node in match.operands.values()}
    order = {node: place for place, node in enumerate(graph.nodes)}
    matches.sort(key=lambda match: order[match.output])
    return Recognition(tuple(matches), misses.report(root for root in roots if root not in matched | idle))


def _read_gemms(reads: dict[fx.Node, frozenset[fx.Node]], misses: _Misses) -> dict[fx.Node, ExpertGemm]:
    gemms: dict[fx.Node, ExpertGemm] = {}
    for node, roots in reads.items():
        pattern = GROUPED_MM if grouped_operands(node) else BATCHED_MM if is_call(node, aten.bmm.default) else "none"
        try:
            if pattern == "none":
                raise NoMatch("{} is a GEMM of one weight, not of one weight for each expert", node.target, node=node)
            gemms[node] = read_grouped_mm(node) if pattern == GROUPED_MM else read_batched_mm(node)
            lonely = NoMatch("no second expert GEMM reads what {} gives", node.name, node=node, progress=0.25)
            misses.keep(pattern, lonely, node, roots)
        except NoMatch as miss:
            misses.keep(pattern, miss, node, roots)
    return gemms


def _behind(down: ExpertGemm, gemms: dict[fx.Node, ExpertGemm]) -> list[ExpertGemm]:
    """The expert GEMMs that ``down`` reads its rows from, through values as large or twice as large as they."""
    if tensor(down.rows) is None:
        return []
    size = numel(down.rows)
    found: list[ExpertGemm] = []
    seen = {down.rows}
    pending = [down.rows]
    while pending:
        node = pending.pop()
        if node in gemms:
            found.append(gemms[node])
            continue
        for arg in node.all_input_nodes:
            if arg not in seen and _as_large(arg, size):
                seen.add(arg)
                pending.append(arg)
    return found


def _as_large(node: fx.Node, size: int | torch.SymInt) -> bool:
    val = node.meta.get("val")
    if isinstance(val, tuple | list):
        return True
    if not isinstance(val, torch.Tensor) or is_size(node):
        return False
    return same(numel(node), size) or same(numel(node), size * 2)


def _match(ups: list[ExpertGemm], down: ExpertGemm, memo: Memo) -> Match:
    with stage(0.3):
        if len(ups) != 1:
            names = ", ".join(up.node.name for up in ups)
            raise NoMatch("{} reads rows of several expert GEMMs: {}", down.node.name, names, node=down.node)
    block = read_block(ups[0], down, memo)
    with stage(0.8):
        check_region(block)
    with stage(0.9):
        prove(block, memo)
    return _described(block, memo)


def _described(block: Block, memo: Memo) -> Match:
    router, routing = _router(block, memo)
    operands = {
        Operand.HIDDEN: block.hidden,
        Operand.TOPK_IDS: block.ids,
        Operand.TOPK_WEIGHTS: block.weights,
        Operand.W13: block.w13.codes,
        Operand.W13_SCALE: block.w13.scale,
        Operand.W13_GLOBAL: block.w13.global_scale,
        Operand.W13_BIAS: block.up.bias,
        Operand.W2: block.w2.codes,
        Operand.W2_SCALE: block.w2.scale,
        Operand.W2_GLOBAL: block.w2.global_scale,
        Operand.W2_BIAS: block.down.bias,
        **block.scalars,
        **routing,
    }
    present = {operand: node for operand, node in operands.items() if node is not None}
    experts, _, width = block.w13.shape
    spec = MoESpec(
        num_experts=experts,
        top_k=block.top_k,
        hidden_size=width,
        intermediate_size=block.w2.shape[2],
        weight_format=block.w13.format,
        activation=block.activation,
        act_dtype=dtype(block.hidden),
        weights_dtype=dtype(block.weights),
        out_dtype=dtype(block.output),
        num_tokens=_token_range(shape(block.hidden)[0]),
        router=router,
        w13_order=block.order,
        weights_transposed=block.up.gemm.k_first,
        has_w13_bias=block.up.bias is not None,
        has_w2_bias=block.down.bias is not None,
    )
    return Match(
        pattern=block.up.gemm.form,
        grade="full" if isinstance(router, RouterSpec) else "experts",
        spec=spec,
        output=block.output,
        nodes=dying(block.output, present.values()),
        operands=present,
        where=location(block.output),
    )


def _router(block: Block, memo: Memo) -> tuple[RouterSpec | GivenRouting, dict[Operand, fx.Node | None]]:
    """The router where it is recognised. A block never fails for its router."""
    try:
        found = identify_router(block.ids, block.weights, block.w13.shape[0], block.top_k, memo)
    except NoMatch as miss:
        logger.debug("%s: routing is taken as given: %s", location(block.output), miss)
        return GivenRouting(), {}
    return found.spec, {
        Operand.ROUTER_LOGITS: found.logits,
        Operand.ROUTER_BIAS: found.bias,
        Operand.ROUTER_SCALE: found.scalars.get("scaling_factor"),
    }


def _token_range(size: int | torch.SymInt) -> TokenRange:
    if isinstance(size, int):
        return TokenRange(size, size)
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    lower, upper = (int(b) if isinstance(b, sympy.Integer) else None for b in (bounds.lower, bounds.upper))
    return TokenRange(lower or 0, None if upper is None or upper >= _UNBOUNDED else upper)
