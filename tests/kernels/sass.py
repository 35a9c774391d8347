"""Machine code of sm_90, read for the registers of products under way."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import triton

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x16\S* R(\d+), R(\d+), gdesc")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d+)")
_NO_RESULT = ("ST", "RED", "LDGSTS", "BRA", "BAR", "WARP", "ISETP", "FSETP", "R2P")


def product_loops(cubin: Path) -> Iterator[list[str]]:
    """Instructions of each loop that multiplies weights in registers."""
    command = [str(_CUOBJDUMP), "-sass", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code = [(int(at, 16), what.strip()) for at, what in re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(.*?);", text)]
    index = {at: i for i, (at, _) in enumerate(code)}
    for i, (at, what) in enumerate(code):
        branch = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", what)
        if branch and (start := index.get(int(branch[1], 16), i + 1)) <= i and int(branch[1], 16) < at:
            body = [instruction for _, instruction in code[start : i + 1]]
            if any(map(_PRODUCT.search, body)):
                yield body


def touched_under_way(body: Sequence[str], late: int = 0) -> list[str]:
    """Instructions of a loop that write what a product under way reads, or read or write its sums.

    ``late``: how many more products each wait is taken to leave under way.
    """
    groups: list[list[tuple[set[int], set[int]]]] = [[]]  # weights and sums of products; the last one is not closed
    found = []
    for instruction in (*body, *body):
        if product := _PRODUCT.search(instruction):
            columns, sums, weights = map(int, product.groups())
            groups[-1].append((set(range(weights, weights + 4)), set(range(sums, sums + columns // 2))))
            if "gsb0" in instruction:
                groups.append([])
        elif wait := _WAIT.search(instruction):
            assert not groups[-1], "a product belongs to no group that is waited for"
            groups = groups[-1 - int(wait[1]) - late :]
        else:
            written, read = _registers(instruction)
            products = (product for group in groups for product in group)
            if any(written & (weights | sums) or read & sums for weights, sums in products):
                found.append(instruction)
    return found


def _registers(instruction: str) -> tuple[set[int], set[int]]:
    """Registers that an instruction writes, and those that it reads."""
    name, _, rest = re.sub(r"^@!?U?P\w+\s+", "", instruction).partition(" ")
    operands = [operand.strip() for operand in rest.split(",")]
    while operands and re.fullmatch(r"!?U?P(\d|T)", operands[0]):
        del operands[0]
    if not operands or name.startswith(_NO_RESULT) or not (result := re.match(r"R(\d+)", operands[0])):
        return set(), _named(operands)
    first = int(result[1])
    return set(range(first, first + _width(name))), _named(operands[1:])


def _named(operands: Sequence[str]) -> set[int]:
    return {int(number) for operand in operands for number in re.findall(r"\bR(\d+)", operand)}


def _width(name: str) -> int:
    if ".128" in name or name.endswith(".4"):
        return 4
    return 2 if ".64" in name or ".WIDE" in name or name == "CS2R" else 1
