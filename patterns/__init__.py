"""Recognition: one file a form or idiom.

``search`` asks every form for candidates, and takes a block that both readings agree on::

    forms       routed_rows (grouped_mm, batched_mm; gemm, rows, masks, combine)
                dense (all experts, or gathered weights; axes, branches, column_major, branch_combine, scores)
                expert_loop (expert_chain, expert_share, expert_stack, picks, picked)
    pieces      dequantize (packed, provenance, decoding, packing, weights)
                activation (activation_catalogue, steps)
                router (router_piece, router_catalogue, router_formulas)
    structure   block: what a form reads; region, writes, assertions: that nothing else is in it or reads it
    numbers     proof, miniature: the whole block on probes; probing, resizing: any piece
    besides     graph_tools, signature (equal layers once), near_misses (why the rest was not),
                linear_layers (which of the rest is no expert's)
"""

from __future__ import annotations

# From the repository root a bare ``import patterns`` finds this folder too and would be a second module.
if __name__ != "fp4_inductor.patterns":
    raise ImportError(f"import fp4_inductor.patterns, not {__name__!r}")
