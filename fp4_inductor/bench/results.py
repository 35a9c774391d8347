"""What was measured, as values: ratios, means, and the files that hold them."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InvalidOptionError
from .machine import Clock


@dataclass(frozen=True, slots=True)
class Column:
    """Who is timed, and on weights of which format."""

    provider: str
    weights: str
    ours: bool

    @property
    def label(self) -> str:
        return f"{self.provider}/{self.weights}"


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of a call, and the clock meanwhile if it was read."""

    us: float
    clock: Clock | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One shape and token count: floors by weight format, timings by a column's label."""

    shape: str
    sizes: tuple[int, int, int, int]
    tokens: int
    floors: dict[str, float]
    timings: dict[str, Timing]

    @property
    def where(self) -> str:
        return f"{self.shape} T={self.tokens}"


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that a run says.

    Attributes:
        environment: device, driver, versions, rates: by name.
        notes: why something is missing, and where.
    """

    environment: dict[str, str]
    columns: tuple[Column, ...]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ours(self) -> tuple[Column, ...]:
        return tuple(column for column in self.columns if column.ours)

    @property
    def peers(self) -> tuple[Column, ...]:
        return tuple(column for column in self.columns if not column.ours)

    def us(self, row: Row, column: Column) -> float | None:
        timing = row.timings.get(column.label)
        return None if timing is None else timing.us

    def over_floor(self, row: Row, column: Column) -> float | None:
        """How many times the floor of its weights a column takes."""
        us, floor = self.us(row, column), row.floors.get(column.weights)
        return None if us is None or floor is None else us / floor

    def best_peer(self, row: Row, column: Column) -> Column | None:
        """The fastest peer on the same weights as ``column``, or on unquantised ones."""
        timed = [
            (us, peer)
            for peer in self.peers
            if peer.weights in (column.weights, "bf16") and (us := self.us(row, peer)) is not None
        ]
        return min(timed, key=lambda pair: pair[0])[1] if timed else None

    def ahead(self, row: Row, column: Column) -> float | None:
        """Time of the best peer over the column's: above one, the column is faster."""
        peer = self.best_peer(row, column)
        return None if peer is None else self.over(row, peer, column)

    def opponent(self, peer: Column) -> Column | None:
        """Our column that a peer is compared with: the first on the same weights, or the first of all."""
        return next((column for column in self.ours if column.weights == peer.weights), next(iter(self.ours), None))

    def over(self, row: Row, column: Column, other: Column | None) -> float | None:
        """Time of ``column`` over that of ``other``."""
        above, below = self.us(row, column), None if other is None else self.us(row, other)
        return None if above is None or below is None else above / below

    def clocks(self, rows: Iterable[Row] | None = None) -> Clock | None:
        """Least of all clocks that were seen while timing, and the median of the medians."""
        rows = self.rows if rows is None else rows
        seen = [timing.clock for row in rows for timing in row.timings.values() if timing.clock is not None]
        if not seen:
            return None
        return Clock(min(clock.least for clock in seen), statistics.median(clock.median for clock in seen))


def write_json(results: Results, path: Path) -> None:
    path.write_text(json.dumps(asdict(results), indent=1), encoding="utf-8")


def read_json(path: Path) -> Results:
    """What ``write_json`` wrote.

    Raises:
        InvalidOptionError: the file is not one of these.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        columns = tuple(Column(**column) for column in found["columns"])
        rows = [_row(row) for row in found["rows"]]
        return Results(dict(found["environment"]), columns, rows, list(found["notes"]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        got = f"{path}: {type(error).__name__}: {error}"
        raise InvalidOptionError("reading --from-json", needed="a file that --json wrote", got=got) from error


def _row(found: dict[str, Any]) -> Row:
    timings = {
        label: Timing(timing["us"], timing["clock"] and Clock(**timing["clock"]))
        for label, timing in found["timings"].items()
    }
    return Row(found["shape"], tuple(found["sizes"]), found["tokens"], found["floors"], timings)


def write_csv(results: Results, path: Path) -> None:
    """One line a row; an empty cell is a number that is not known."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, _csv_names(results), restval="")
        writer.writeheader()
        writer.writerows(_csv_cells(results, row) for row in results.rows)


def _csv_names(results: Results) -> list[str]:
    names = ["shape", "num_experts", "top_k", "hidden_size", "intermediate_size", "tokens"]
    names += [f"floor/{weights}_us" for weights in dict.fromkeys(column.weights for column in results.ours)]
    for column in results.columns:
        names += [f"{column.label}_us", f"{column.label}_mhz"]
        about = ("over_floor", "best_peer", "ahead") if column.ours else ("over_ours",)
        names += [f"{column.label}_{what}" for what in about]
    return names


def _csv_cells(results: Results, row: Row) -> dict[str, object]:
    names = ("num_experts", "top_k", "hidden_size", "intermediate_size")
    cells: dict[str, object] = {"shape": row.shape, "tokens": row.tokens, **dict(zip(names, row.sizes, strict=True))}
    cells.update({f"floor/{weights}_us": us for weights, us in row.floors.items()})
    for column in results.columns:
        timing = row.timings.get(column.label)
        if timing is None:
            continue
        cells[f"{column.label}_us"] = timing.us
        if timing.clock is not None:
            cells[f"{column.label}_mhz"] = timing.clock.median
        if column.ours:
            peer = results.best_peer(row, column)
            cells[f"{column.label}_over_floor"] = results.over_floor(row, column)
            cells[f"{column.label}_best_peer"] = None if peer is None else peer.label
            cells[f"{column.label}_ahead"] = results.ahead(row, column)
        else:
            cells[f"{column.label}_over_ours"] = results.over(row, column, results.opponent(column))
    return cells
