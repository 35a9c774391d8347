"""Block shapes of the W4A16 kernels by tokens an expert and device family. Measured; imports no triton."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """How one GEMM is cut.

    Attributes:
        block_n: weight rows of a program; a multiple of 64.
        block_k: columns of a step; a multiple of 64.
        prefetch: 64-column groups that a program asks the L2 cache for before it starts; 0 or a power of two.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    prefetch: int = 0


@dataclass(frozen=True, slots=True)
class W4A16Config:
    """Both GEMMs; they share the token tiles.

    Attributes:
        block_m: tokens of a tile.
        group_m: tiles that run side by side on one piece of the weights.
        pdl: a kernel may start while the one before it still runs.
    """

    block_m: int
    group_m: int
    gate_up: GemmConfig
    down: GemmConfig
    pdl: bool = False


@dataclass(frozen=True, slots=True)
class DecodeGemm:
    """How one GEMM of the kernels for few tokens is cut.

    Attributes:
        block_n: weight rows of a program: 16, 32 or 64.
        split: programs' warps, or warps of a slot, that share K.
        groups: 64-column groups that a warp takes in a step.
        prefetch: groups that a program asks the L2 cache for before it starts; 0 or a power of two.
    """

    block_n: int
    split: int
    groups: int
    num_stages: int
    prefetch: int


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Both GEMMs of the kernels for few tokens.

    Attributes:
        pdl: a kernel may start while the one before it still runs.
    """

    gate_up: DecodeGemm
    down: DecodeGemm
    pdl: bool


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
# On sm_100 a down projection of 128 x 128 spills registers; half as wide it does not.
_UP_TO_128_NARROW = (
    *_UP_TO_128[:-1],
    (None, W4A16Config(128, 16, _GATE_UP, GemmConfig(block_n=64, block_k=64, num_warps=4, num_stages=4))),
)

_LARGE_EXPERT = 24 << 20
_BARRIERS = 1024
"""Bytes that Triton may add for barriers."""

FAMILIES = {
    80: _UP_TO_64,
    86: _UP_TO_64,
    89: _UP_TO_64,
    90: _UP_TO_128,
    100: _UP_TO_128_NARROW,
    103: _UP_TO_128_NARROW,
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


_DECODE_PAIRS = 0
"""Pairs up to which ``choose_decode`` finds a configuration."""
_PDL_FAMILIES = (90, 100, 103, 120, 121)


def choose_decode(
    arch: int, sm_count: int, num_tokens: int, top_k: int, rows: int, hidden_size: int
) -> DecodeConfig | None:
    """The configuration of the kernels for few tokens, or None where there are too many; ``rows`` are those of w13."""
    num_pairs = num_tokens * top_k
    if num_pairs > _DECODE_PAIRS:
        return None
    slots = 1 << (top_k - 1).bit_length()

    def block_n(num_rows: int, copies: int) -> int:
        """The widest block that still gives every multiprocessor a program, nearly."""
        return next((n for n in (64, 32) if num_rows // n * copies >= 0.9 * sm_count), 16)

    gate_up = DecodeGemm(block_n(rows, num_pairs), split=8, groups=1, num_stages=3, prefetch=0)
    split = max(1, 16 // slots)
    down = DecodeGemm(block_n(hidden_size, num_tokens), split=split, groups=1, num_stages=3, prefetch=64)
    return DecodeConfig(gate_up, down, pdl=arch in _PDL_FAMILIES)


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
