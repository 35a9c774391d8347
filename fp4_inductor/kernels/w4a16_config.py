"""Block shapes of the W4A16 kernels by tokens an expert and device family. Measured; imports no triton."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """How one GEMM is cut.

    Attributes:
        block_n: weight rows of a program (of gate and of up each).
        block_k: columns of a step; a multiple of 128.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class W4A16Config:
    """Both GEMMs; they share the token tiles.

    Attributes:
        block_m: tokens of a tile.
    """

    block_m: int
    gate_up: GemmConfig
    down: GemmConfig


def _both(block_m: int, config: GemmConfig) -> W4A16Config:
    return W4A16Config(block_m, config, config)


# Largest expected tokens an expert, and what serves them. 227 KiB of shared memory a block: sm_90, sm_100, sm_103.
_LARGE = (
    (16, _both(16, GemmConfig(64, 128, 4, 4))),
    (32, _both(32, GemmConfig(64, 128, 4, 4))),
    (64, _both(64, GemmConfig(64, 128, 4, 4))),
    (None, W4A16Config(128, GemmConfig(64, 128, 4, 3), GemmConfig(128, 128, 8, 3))),
)
# 99 KiB and more: sm_80, sm_86, sm_89, sm_120, sm_121.
_SMALL = (
    (16, _both(16, GemmConfig(64, 128, 4, 4))),
    (32, _both(32, GemmConfig(64, 128, 4, 3))),
    (None, _both(64, GemmConfig(64, 128, 4, 3))),
)

_PROGRAMS_PER_SM = 4

FAMILIES = {80: _SMALL, 86: _SMALL, 89: _SMALL, 90: _LARGE, 100: _LARGE, 103: _LARGE, 120: _SMALL, 121: _SMALL}
"""Configurations by ``DeviceInfo.arch``."""


def choose_config(arch: int, num_pairs: int, num_experts: int) -> W4A16Config:
    """The configuration for ``num_pairs`` routed pairs spread evenly over the experts."""
    tokens = num_pairs / num_experts
    for limit, config in FAMILIES[arch]:
        if limit is None or tokens <= limit:
            return config
    raise AssertionError("the last row has no limit")


def choose_split(num_blocks: int, steps: int, sm_count: int) -> int:
    """How many programs share an output block, so that a few tokens fill the device: four programs an SM.

    Each keeps two steps of the ``steps`` along K, and no more than eight share.
    """
    return max(1, min(_PROGRAMS_PER_SM * sm_count // num_blocks, steps // 2, 8))


def configs(arch: int) -> tuple[W4A16Config, ...]:
    """Every configuration of a device family."""
    return tuple(config for _, config in FAMILIES[arch])
