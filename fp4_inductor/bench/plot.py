"""Time over tokens, both logarithmic: one panel a shape, a line a column, and the floor."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from ..errors import InvalidOptionError
from .results import Results

_PANELS_A_LINE = 3


def require_matplotlib() -> None:
    """Say that it is missing before anything is measured.

    Raises:
        InvalidOptionError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidOptionError(
            "drawing --plot",
            needed="matplotlib",
            got="an environment without it",
            now="pip install fp4_inductor[bench], or write --json here and draw elsewhere with --from-json FILE --plot",
        )


def draw(results: Results, path: Path) -> None:
    """Write a PNG; ``require_matplotlib`` was called."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shapes = list(dict.fromkeys(row.shape for row in results.rows))
    across = max(min(len(shapes), _PANELS_A_LINE), 1)
    down = max(-(-len(shapes) // across), 1)
    figure = Figure(figsize=(5.2 * across, 4.2 * down), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(down, across, squeeze=False).flatten()
    for panel, shape in zip(panels, shapes, strict=False):
        _panel(panel, results, shape)
    for panel in panels[len(shapes) :]:
        panel.axis("off")
    if shapes:
        panels[0].legend(fontsize="small")
    about = {name: results.environment[name] for name in ("device", "torch", "triton") if name in results.environment}
    figure.suptitle(", ".join(f"{name} {value}" for name, value in about.items()), fontsize="medium")
    figure.savefig(path, format="png", dpi=120)


def _panel(panel: Any, results: Results, shape: str) -> None:
    rows = sorted((row for row in results.rows if row.shape == shape), key=lambda row: row.tokens)
    for column in results.columns:
        points = [(row.tokens, us) for row in rows if (us := results.us(row, column)) is not None]
        if points:
            width = 2.0 if column.ours else 1.0
            panel.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=width, label=column.label)
    first = results.ours[0].weights
    floor = [(row.tokens, row.floors[first]) for row in rows if first in row.floors]
    if floor:
        panel.plot(*zip(*floor, strict=True), color="black", linestyle="--", linewidth=1, label=f"floor/{first}")
    panel.set(title=shape, xlabel="tokens", ylabel="µs a layer call", xscale="log", yscale="log")
    panel.grid(visible=True, which="both", alpha=0.2)
