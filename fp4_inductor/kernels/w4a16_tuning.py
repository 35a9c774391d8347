"""Configurations of the W4A16 kernels as text, and their neighbours, for tuning. Imports no triton.

A table's text is an argument of the op, so it is part of the graph: it survives every cache and shows in dumps.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace
from functools import cache

from .w4a16_config import BLOCK, GLUON, GLUON_WIDE, GemmConfig, W4A16Config, shared_memory

PARTS = ("tiles", "gate_up", "down")
"""What is tuned, one after the other: token tiles of both GEMMs, then each GEMM alone."""

_TILES = (8, 16, 32, 64, 128)
_CHOICES: dict[str, tuple[int, ...]] = {
    "block_n": (64, 128),
    "block_k": (64, 128),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5, 6),
}
_HOPPER_CHOICES = {"num_stages": (3, 4, 5, 6)}
_WIDE_TILES = 64
"""Tokens of a tile from which two warpgroups are worth a trial."""
_PLAIN_TILES = 16
"""Tokens that a plain kernel's product takes at least."""
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
    """``config``, then what differs from it in one number of ``part`` and takes at most ``limit`` shared memory.

    A GEMM of a configuration with kernels of ``w4a16_hopper``, which so has a device for them, also runs in the
    other kernels.
    """
    near = _tiles(config) if part == "tiles" else _gemms(config, part)
    return config, *(other for other in near if other != config and _fits(other, limit))


def _tiles(config: W4A16Config) -> Iterator[W4A16Config]:
    all_hopper = config.gate_up.hopper and config.down.hopper
    for block_m in _TILES:
        if block_m in (config.block_m // 2, config.block_m * 2) and (all_hopper or block_m >= config.min_m):
            yield replace(config, block_m=block_m)
    if config.block_m >= 64:
        yield replace(config, group_m=1 if config.group_m > 1 else 16)


def _gemms(config: W4A16Config, part: str) -> Iterator[W4A16Config]:
    gemm: GemmConfig = getattr(config, part)
    others = [
        replace(gemm, **{name: value})  # type: ignore[arg-type]
        for name, values in (_HOPPER_CHOICES if gemm.hopper else _CHOICES).items()
        for value in values
    ]
    if config.hopper:
        others += [kind for kind in _kinds(config) if (kind.hopper, kind.num_warps) != (gemm.hopper, gemm.num_warps)]
    for other in others:
        min_m = config.min_m if other.hopper else max(config.min_m, _PLAIN_TILES)
        yield replace(config, min_m=min_m, **{part: other})  # type: ignore[arg-type]


def _kinds(config: W4A16Config) -> Iterator[GemmConfig]:
    """What runs a GEMM on sm_90."""
    yield GLUON
    if config.block_m >= _WIDE_TILES:
        yield GLUON_WIDE
    if config.block_m >= _PLAIN_TILES:
        yield BLOCK


def _fits(config: W4A16Config, limit: int) -> bool:
    blocks = (config.block_m * gemm.block_n // (32 * gemm.num_warps) for gemm in (config.gate_up, config.down))
    return shared_memory(config) <= limit and max(blocks) <= _ACCUMULATORS


@cache
def _read_table(table: str) -> tuple[tuple[int | None, W4A16Config], ...]:
    return tuple((limit, _config(values)) for limit, values in ast.literal_eval(table))


def _config(values: tuple[int | tuple[int, ...], ...]) -> W4A16Config:
    return W4A16Config(*(GemmConfig(*value) if isinstance(value, tuple) else value for value in values))  # type: ignore[arg-type]
