"""Configurations of the W4A16 kernels as text, and what tuning tries of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import astuple, fields
from typing import Any

import pytest

from fp4_inductor.device import DeviceInfo
from fp4_inductor.kernels.w4a16_config import FAMILIES, W4A16Config, configs, shared_memory
from fp4_inductor.kernels.w4a16_tuning import (
    PARTS,
    choose_tuned,
    read_config,
    variants,
    write_config,
    write_table,
)

ALL = sorted({config for arch in FAMILIES for config in configs(arch)}, key=str)


@pytest.mark.parametrize("config", ALL, ids=write_config)
def test_text_says_all_of_a_configuration(config: W4A16Config) -> None:
    assert read_config(write_config(config)) == config
    assert ast.literal_eval(write_config(config)) == astuple(config)


def test_a_table_is_read_by_token_count() -> None:
    small, large = write_config(ALL[0]), write_config(ALL[-1])
    table = write_table([(8, small), (128, large), (None, small)])
    assert [choose_tuned(table, count) for count in (1, 8)] == [ALL[0]] * 2
    assert [choose_tuned(table, count) for count in (9, 128)] == [ALL[-1]] * 2
    assert choose_tuned(table, 129) == ALL[0]
    assert choose_tuned(write_table([(None, large)]), 0) == ALL[-1]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("arch", FAMILIES)
def test_variants_change_one_number_of_their_part_and_fit(arch: int, part: str) -> None:
    limit = DeviceInfo.parse(f"sm_{arch}").shared_memory
    for config in configs(arch):
        found = variants(config, part, limit)
        assert found[0] == config
        assert len(set(found)) == len(found)
        assert len(found) > 1 or getattr(config, part, None) is None
        for other in found[1:]:
            assert shared_memory(other) <= limit
            if kinds(other) == kinds(config):
                flat = [list(_numbers(astuple(c))) for c in (config, other)]
                assert sum(a != b for a, b in zip(*flat, strict=True)) == 1
            changed = {f.name for f in fields(config) if getattr(config, f.name) != getattr(other, f.name)}
            if other.min_m == 16 > config.min_m:  # the least that a plain kernel's product takes
                assert not getattr(other, part).hopper
                changed.discard("min_m")
            assert changed <= ({"block_m", "group_m"} if part == "tiles" else {part})


def kinds(config: W4A16Config) -> list[tuple[bool, int]]:
    """Which kernel runs each GEMM, and in how many warps where it is one of ``w4a16_hopper``."""
    return [(g.hopper, g.num_warps if g.hopper else 0) for g in (config.gate_up, config.down)]


@pytest.mark.parametrize("part", ["gate_up", "down"])
def test_each_gemm_tries_the_kernels_that_its_device_is_known_to_have(part: str) -> None:
    limit = DeviceInfo.parse("sm_90").shared_memory
    for arch in FAMILIES:
        for config in configs(arch):
            found = {(g.hopper, g.num_warps) for g in (getattr(c, part) for c in variants(config, part, limit))}
            if not config.hopper:
                assert not any(hopper for hopper, _ in found)
            elif config.block_m >= 64:
                assert found >= {(False, 4), (True, 4), (True, 8)}
            else:
                assert (True, 8) not in found
                assert ((False, 4) in found) == (config.block_m >= 16)


def test_what_needs_too_much_shared_memory_is_not_tried() -> None:
    config = configs(80)[0]
    limit = shared_memory(config)
    assert all(shared_memory(other) <= limit for other in variants(config, "gate_up", limit))
    assert len(variants(config, "gate_up", limit)) < len(variants(config, "gate_up", 10 * limit))


def _numbers(values: Any) -> Iterator[int]:
    for value in values:
        if isinstance(value, tuple):
            yield from _numbers(value)
        else:
            yield value
