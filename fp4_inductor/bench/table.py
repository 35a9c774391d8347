"""Results as text: a line a shape and token count, then geometric means."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from .results import Column, Results, Row

_TIME, _RATIO, _CLOCK = 10, 8, 12
_Worst = Callable[[list[tuple[float, str]]], tuple[float, str]]


def header(results: Results) -> str:
    """What the numbers were taken on, and two lines that name the columns."""
    about = ", ".join(f"{name} {value}" for name, value in results.environment.items())
    first, second = f"{'':20}", f"{'shape':14}{'tokens':>6}"
    for weights in _floors(results):
        first += f"{'floor':>{_TIME}}"
        second += f"{weights:>{_TIME}}"
    for column in results.columns:
        ratios = _ratio_names(results, column)
        width = max(_TIME + _RATIO * len(ratios), len(column.provider) + 2)
        first += f"{column.provider:>{width}}"
        text = f"{column.weights:>{_TIME}}" + "".join(f"{name:>{_RATIO}}" for name in ratios)
        second += f"{text:>{width}}"
    return (
        f"{about}\nmicroseconds of a layer call, from router logits to output\n\n{first}\n{second}{'SM MHz':>{_CLOCK}}"
    )


def line(results: Results, row: Row) -> str:
    """One row of the table; the clock is the least and the median while any column of it was timed."""
    text = f"{row.shape:14}{row.tokens:6}"
    for weights in _floors(results):
        text += _time(row.floors.get(weights))
    for column in results.columns:
        ratios = {
            "/floor": results.over_floor(row, column),
            "peer/it": results.ahead(row, column),
            "/ours": results.over(row, column, results.opponent(column)),
        }
        names = _ratio_names(results, column)
        cells = _time(results.us(row, column)) + "".join(_ratio(ratios[name]) for name in names)
        text += f"{cells:>{len(column.provider) + 2}}"
    clock = results.clocks([row])
    return text + f"{'not read' if clock is None else f'{clock.least}/{clock.median:.0f}':>{_CLOCK}}"


def summary(results: Results) -> str:
    """Geometric means over all rows, where the worst stands, the clocks, and every note."""
    lines = [f"geometric means over {len(results.rows)} rows"]
    for column in results.ours:
        lines += _about(results, column)
    clock = results.clocks()
    seen = "not read" if clock is None else f"{clock.median:.0f} MHz median, {clock.least} MHz least"
    return "\n".join([*lines, f"SM clock while timing: {seen}", *results.notes])


def _about(results: Results, column: Column) -> list[str]:
    first = results.ours[0]
    found = [
        _mean(results, f"{column.label} / floor", lambda row: results.over_floor(row, column), max),
        _mean(results, f"{column.label} / {first.label}", lambda row: results.over(row, column, first), max)
        if column != first
        else "",
        _mean(results, f"best peer / {column.label}", lambda row: results.ahead(row, column), min),
    ]
    for peer in results.peers:
        if results.opponent(peer) == column:
            name = f"{peer.label} / {column.label}"
            found.append(_mean(results, name, lambda row, peer=peer: results.over(row, peer, column), min))  # type: ignore[misc]
    return [text for text in found if text]


def _mean(results: Results, name: str, value: Callable[[Row], float | None], worst: _Worst) -> str:
    """The mean over the rows that have a value, and the worst; how often it is below one where less is worse."""
    found = [(number, row.where) for row in results.rows if (number := value(row)) is not None]
    if not found:
        return ""
    extreme, where = worst(found)
    text = f"  {name}: {statistics.geometric_mean(number for number, _ in found):.3f}, worst {extreme:.3f} at {where}"
    if worst is min:
        text += f", below 1 at {sum(number < 1 for number, _ in found)}"
    return text if len(found) == len(results.rows) else f"{text} (of {len(found)} rows)"


def _floors(results: Results) -> list[str]:
    """Weight formats that some row has a floor of, in the order of our columns."""
    known = {weights for row in results.rows for weights in row.floors}
    return [weights for weights in dict.fromkeys(column.weights for column in results.ours) if weights in known]


def _ratio_names(results: Results, column: Column) -> list[str]:
    """Which ratios stand behind a column's time."""
    if not column.ours:
        return ["/ours"]
    return [*(["/floor"] if column.weights in _floors(results) else []), *(["peer/it"] if results.peers else [])]


def _time(us: float | None) -> str:
    if us is None:
        return f"{'-':>{_TIME}}"
    digits = 2 if us < 10 else 1 if us < 1000 else 0
    return f"{us:>{_TIME}.{digits}f}"


def _ratio(number: float | None) -> str:
    return f"{'-':>{_RATIO}}" if number is None else f"{number:>{_RATIO}.2f}"
