"""Recognition: one file a form or idiom."""

from __future__ import annotations

# From the repository root a bare ``import patterns`` finds this folder too and would be a second module.
if __name__ != "fp4_inductor.patterns":
    raise ImportError(f"import fp4_inductor.patterns, not {__name__!r}")
