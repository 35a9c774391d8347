"""Block shapes of the W4A16 kernels by tokens an expert and device family. Measured; imports no triton."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """How one GEMM is cut.

    Attributes:
        block_n: weight rows of a program; a multiple of 64.
        block_k: columns of a step; a multiple of 64.
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
        group_m: tiles that run side by side on one piece of the weights.
    """

    block_m: int
    group_m: int
    gate_up: GemmConfig
    down: GemmConfig


_GATE_UP = GemmConfig(block_n=128, block_k=64, num_warps=4, num_stages=4)
_DOWN = GemmConfig(block_n=128, block_k=64, num_warps=4, num_stages=4)

# Largest expected tokens an expert, and the tile that serves them. Swept on an H200 over the layers of gpt-oss,
# Qwen3-30B-A3B, Mixtral 8x7B and DeepSeek-V3 with 1 to 16384 tokens. Other families are not measured: they take
# what fits their shared memory.
_UP_TO_64 = (
    (10, W4A16Config(16, 1, _GATE_UP, _DOWN)),
    (24, W4A16Config(32, 1, _GATE_UP, _DOWN)),
    (None, W4A16Config(64, 1, _GATE_UP, _DOWN)),
)
_UP_TO_128 = (
    *_UP_TO_64[:2],
    (192, W4A16Config(64, 1, _GATE_UP, _DOWN)),
    (None, W4A16Config(128, 16, _GATE_UP, _DOWN)),
)

_LARGE_EXPERT = 24 << 20
_BARRIERS = 1024
"""Bytes that Triton may add for barriers."""

FAMILIES = {
    80: _UP_TO_64,
    86: _UP_TO_64,
    89: _UP_TO_64,
    90: _UP_TO_128,
    100: _UP_TO_128,
    103: _UP_TO_128,
    120: _UP_TO_64,
    121: _UP_TO_64,
}
"""Configurations by ``DeviceInfo.arch``."""


def choose_config(arch: int, num_pairs: int, num_experts: int) -> W4A16Config:
    """The configuration for ``num_pairs`` routed pairs spread evenly over the experts."""
    tokens = num_pairs / num_experts
    for limit, config in FAMILIES[arch]:
        if limit is None or tokens <= limit:
            return config
    raise AssertionError("the last row has no limit")


def choose_split(num_blocks: int, steps: int, sm_count: int) -> int:
    """How many programs share an output block along its ``steps`` of K, so that a few tokens fill the device.

    Three programs an SM are wanted even if short ones, twelve if each keeps a long way to go.
    """
    short = min(round(3 * sm_count / num_blocks), steps // 2)
    long = min(round(12 * sm_count / num_blocks), steps // 20)
    return max(1, min(max(short, long), 8))


def choose_group(config: W4A16Config, expert_bytes: int) -> int:
    """How many token tiles share one piece of the weights: more where an expert's weights crowd out the L2 cache."""
    return max(config.group_m, 16) if config.block_m >= 64 and expert_bytes > _LARGE_EXPERT else config.group_m


def configs(arch: int) -> tuple[W4A16Config, ...]:
    """Every configuration of a device family."""
    return tuple(config for _, config in FAMILIES[arch])


def shared_memory(config: W4A16Config) -> int:
    """Bytes of shared memory a program needs at most: one buffer of tokens, words and scales a stage."""

    def need(gemm: GemmConfig) -> int:
        tokens = config.block_m * gemm.block_k * 2
        packed = gemm.block_n * (gemm.block_k // 2 + gemm.block_k // 16)
        return gemm.num_stages * (tokens + packed)

    return max(need(config.gate_up), need(config.down)) + _BARRIERS
