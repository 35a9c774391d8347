"""Configurations of the W4A16 kernels as text, and their neighbours, for tuning. Imports no triton.

A table's text is an argument of the op, so it is part of the graph: it survives every cache and shows in dumps.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import astuple, fields, replace
from functools import cache
from typing import Any

from .w4a16_config import GemmConfig, W4A16Config, shared_memory

PARTS = ("tiles", "gate_up", "down", "long_down")
"""What is tuned, one after the other: token tiles of all GEMMs, then each GEMM alone, where a table has it."""

_TILES = (16, 32, 64, 128, 256)
_CHOICES: dict[str, tuple[int, ...]] = {
    "block_n": (64, 128),
    "block_k": (64, 128),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5, 6),
}
_ACCUMULATORS = 128
"""float32 of a thread that an output block may take; more leave no registers to decode with."""


def write_config(config: W4A16Config) -> str:
    return repr(astuple(config))


def read_config(text: str) -> W4A16Config:
    return _config(ast.literal_eval(text))


def write_table(rows: Sequence[tuple[int | None, str]]) -> str:
    """Text of a table from the most tokens that each row is for (None: any) and its configuration's text."""
    return repr(tuple((limit, ast.literal_eval(config)) for limit, config in rows))


def choose_tuned(table: str, num_tokens: int) -> W4A16Config:
    """The configuration for ``num_tokens`` in a table's text."""
    for limit, config in _read_table(table):
        if limit is None or num_tokens <= limit:
            return config
    raise AssertionError("the last row has no limit")


def variants(config: W4A16Config, part: str, limit: int) -> tuple[W4A16Config, ...]:
    """``config``, then what differs from it in one number of ``part`` and takes at most ``limit`` shared memory."""
    near = _tiles(config) if part == "tiles" else _gemms(config, part)
    return config, *(other for other in near if other != config and _fits(other, limit))


def _tiles(config: W4A16Config) -> Iterator[W4A16Config]:
    for block_m in _TILES:
        if block_m in (config.block_m // 2, config.block_m * 2) and block_m >= getattr(config, "min_m", 0):
            yield replace(config, block_m=block_m)
    if config.block_m >= 64:
        yield replace(config, group_m=1 if config.group_m > 1 else 16)


def _gemms(config: W4A16Config, part: str) -> Iterator[W4A16Config]:
    gemm = getattr(config, part, None)
    if isinstance(gemm, GemmConfig):
        for name, values in _CHOICES.items():
            for value in values:
                changes: dict[str, Any] = {part: replace(gemm, **{name: value})}
                yield replace(config, **changes)


def _fits(config: W4A16Config, limit: int) -> bool:
    gemms = [gemm for f in fields(config) if isinstance(gemm := getattr(config, f.name), GemmConfig)]
    most = max(gemm_tile(config, gemm) * gemm.block_n // (32 * gemm.num_warps) for gemm in gemms)
    return shared_memory(config) <= limit and most <= _ACCUMULATORS


def gemm_tile(config: W4A16Config, gemm: GemmConfig) -> int:
    """Tokens of one program of ``gemm``, which may cut the tiles that all share."""
    return min(config.block_m, getattr(gemm, "block_m", None) or config.block_m)


@cache
def _read_table(table: str) -> tuple[tuple[int | None, W4A16Config], ...]:
    return tuple((limit, _config(values)) for limit, values in ast.literal_eval(table))


def _config(values: tuple[int | tuple[int, ...], ...]) -> W4A16Config:
    return W4A16Config(*(GemmConfig(*value) if isinstance(value, tuple) else value for value in values))  # type: ignore[arg-type]
