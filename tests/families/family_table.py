"""MODELS.md: what is recognised of every model family. ``make models`` writes it, ``test_families`` holds it."""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import multiprocessing
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from family_models import FAMILIES
from family_runs import FORMS, Block, Run, run_family
from tqdm import tqdm

PATH = Path(__file__).parents[2] / "MODELS.md"
GRADES = ("refused", "experts", "full")
"""From worst to best."""

_HEAD = """\
# Model families

Every family of transformers {version} whose experts stand under `use_experts_implementation`, as a tiny model with
random FP4 experts: compiled whole in one graph, in both forms that transformers writes experts in, each block held to
float64 on the values it gets. `make models` writes this page; a test fails when a family falls behind it.

**{matched} of {families} families are recognised in both forms, {full} of them with every router.**

- *Grade* `full`: experts and router are recognised. `experts`: the fused op takes expert ids and weights as the
  graph computes them. `refused`: the block is left as written.
- *Router*, *activation*: what the block computes, as the report of `explain` names it; `given` is any other router.
- *Experts*: how gate and up rows share a weight, whether it is stored as `[E, K, N]`, and whether there are biases.
- A family with several kinds of blocks has a line for each.

| Family | Model | Form | Grade | Router | Activation | Experts |
|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Outcome:
    """What is recognised of one block. ``reason`` says why it was refused."""

    grade: str
    router: str = "–"
    activation: str = "–"
    experts: str = "–"
    reason: str = field(default="", compare=False)

    @classmethod
    def of(cls, block: Block) -> Outcome:
        spec = block.match.spec
        experts = [str(spec.w13_order) if spec.activation.gated else "up only"]
        experts += ["[E, K, N]"] if spec.weights_transposed else []
        experts += ["biases"] if spec.has_w13_bias and spec.has_w2_bias else []
        return cls(block.match.grade, str(spec.router), str(spec.activation), ", ".join(experts))

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.grade, self.reason or self.router, self.activation, self.experts)

    @property
    def rank(self) -> int:
        return GRADES.index(self.grade)


Table: TypeAlias = "dict[tuple[str, str], tuple[Outcome, ...]]"
"""The blocks of each (family, form), in the order in which the model computes them."""


def outcomes(run: Run) -> tuple[Outcome, ...]:
    """The blocks that were recognised; a refusal for FP4 weights that are in none."""
    found = [Outcome.of(block) for block in run.blocks]
    if run.near_misses:
        miss = run.near_misses[0]
        found.append(Outcome("refused", reason=f"{miss.reason} (at `{miss.where.module}`)"))
    return tuple(found)


def is_worse(new: tuple[Outcome, ...], old: tuple[Outcome, ...]) -> bool:
    """Whether a block was lost, fell in grade, or is taken for another computation than before."""
    if len(new) < len(old):
        return True
    return any(
        n.rank < o.rank
        or (o.grade != "refused" and (n.activation, n.experts) != (o.activation, o.experts))
        or (o.grade == "full" and n.router != o.router)
        for n, o in zip(new, old, strict=False)
    )


def read(path: Path = PATH) -> Table:
    """The table on the page."""
    table: Table = {}
    for line in path.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("| ") or cells[0] not in FAMILIES:
            continue
        family, _, form, grade, router, activation, experts = cells
        outcome = (
            Outcome("refused", reason=router) if grade == "refused" else Outcome(grade, router, activation, experts)
        )
        for each in FORMS if form == "both" else (form,):
            table[family, each] = (*table.get((family, each), ()), outcome)
    return table


def version(path: Path = PATH) -> str:
    """The release of transformers that the page speaks of."""
    return path.read_text().partition("Every family of transformers ")[2].split(maxsplit=1)[0]


def render(table: Table) -> str:
    """The page."""
    lines = [line for family in FAMILIES for line in _rows(family, table)]
    both = {family: [o for form in FORMS for o in table[family, form]] for family in FAMILIES}
    head = _HEAD.format(
        version=importlib.metadata.version("transformers"),
        families=len(FAMILIES),
        matched=_count(both, worst=1),
        full=_count(both, worst=2),
    )
    return head + "\n".join(lines) + "\n"


def _count(found: Mapping[str, Iterable[Outcome]], worst: int) -> int:
    return sum(all(outcome.rank >= worst for outcome in each) for each in found.values())


def _rows(family: str, table: Table) -> list[str]:
    first, second = (table[family, form] for form in FORMS)
    forms = {"both": first} if first == second else dict(zip(FORMS, (first, second), strict=True))
    return [
        f"| {family} | {FAMILIES[family].model} | {form} | {' | '.join(outcome.cells)} |"
        for form, found in forms.items()
        for outcome in found
    ]


def _measure(family: str) -> Table:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    return {(family, form): outcomes(run_family(family, form)) for form in FORMS}


def main() -> None:
    """Run families, all unless some are named, and print or write the page."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("families", nargs="*", help="the rest keeps what the page says")
    parser.add_argument("--write", action="store_true", help="write the page instead of printing it")
    parser.add_argument("--workers", type=int, default=2, help="families at a time")
    args = parser.parse_args()
    families = args.families or list(FAMILIES)
    table: Table = read() if args.families else {}
    with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")) as pool:
        for part in tqdm(pool.map(_measure, families), total=len(families), unit="family", disable=None):
            table |= part
    if args.write:
        PATH.write_text(render(table))
    else:
        print(render(table), end="")


if __name__ == "__main__":
    main()
