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
        min_m: tokens of the narrowest product, for the tiles that are not full.
        group_m: tiles that run side by side on one piece of the weights.
        pdl: a kernel may start while the one before it still runs.
    """

    block_m: int
    min_m: int
    group_m: int
    gate_up: GemmConfig
    down: GemmConfig
    pdl: bool = False


@dataclass(frozen=True, slots=True)
class DecodeGemm:
    """How one GEMM of the kernels for few tokens is cut.

    Attributes:
        block_n: weight rows of a program: 16, 32 or 64.
        split: warps that share K, of a program or of a slot.
        groups: 64-column groups that a warp takes in a step.
    """

    block_n: int
    split: int
    groups: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Both GEMMs of the kernels for few tokens.

    Attributes:
        combine: the down projection's programs take all slots of a token and add them up; otherwise those of an
            expert take all tokens, and another kernel adds.
        pdl: a kernel may start while the one before it still runs.
    """

    gate_up: DecodeGemm
    down: DecodeGemm
    combine: bool
    pdl: bool


_BLOCK = GemmConfig(block_n=128, block_k=64, num_warps=4, num_stages=4)
_NARROW = GemmConfig(block_n=64, block_k=64, num_warps=4, num_stages=4)

# Largest expected tokens an expert, and the tile that serves them. Swept on an H200 over the layers of gpt-oss,
# Qwen3-30B-A3B, Mixtral 8x7B and DeepSeek-V3 with 4 to 16384 tokens: see NOTES.md. Other families are not measured:
# they take what fits their shared memory and registers.
_HOPPER = (
    (10, W4A16Config(16, 16, 1, _BLOCK, _BLOCK, pdl=True)),
    (24, W4A16Config(32, 16, 1, _BLOCK, _BLOCK, pdl=True)),
    (110, W4A16Config(64, 16, 1, _BLOCK, _BLOCK, pdl=True)),
    (None, W4A16Config(128, 32, 4, _BLOCK, _BLOCK, pdl=True)),
)
_UP_TO_64 = (
    (10, W4A16Config(16, 16, 1, _BLOCK, _BLOCK)),
    (24, W4A16Config(32, 16, 1, _BLOCK, _BLOCK)),
    (None, W4A16Config(64, 16, 1, _BLOCK, _BLOCK)),
)
# On sm_100 a block of 128 x 128 spills registers; half as wide it does not.
_BLACKWELL = (
    *_UP_TO_64[:2],
    (192, W4A16Config(64, 16, 1, _BLOCK, _BLOCK)),
    (None, W4A16Config(128, 32, 16, _BLOCK, _NARROW)),
)

_LARGE_EXPERT = 24 << 20
_BARRIERS = 1024
"""Bytes that Triton may add for barriers."""

FAMILIES = {
    80: _UP_TO_64,
    86: _UP_TO_64,
    89: _UP_TO_64,
    90: _HOPPER,
    100: _BLACKWELL,
    103: _BLACKWELL,
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


_DECODE_TOKENS = 0
"""Tokens up to which ``choose_decode`` finds a configuration; the kernels take up to 8."""
_PDL_FAMILIES = (90, 100, 103, 120, 121)


def choose_decode(
    arch: int, sm_count: int, num_tokens: int, top_k: int, rows: int, hidden_size: int
) -> DecodeConfig | None:
    """The configuration of the kernels for few tokens, or None where there are too many; ``rows`` are those of w13."""
    if num_tokens > _DECODE_TOKENS:
        return None
    num_pairs, combine = num_tokens * top_k, num_tokens == 1

    def block_n(num_rows: int, copies: int) -> int:
        """The widest block that still gives every multiprocessor a program, nearly."""
        return next((n for n in (64, 32) if num_rows // n * copies >= 0.9 * sm_count), 16)

    gate_up = DecodeGemm(block_n(rows, num_pairs), split=4, groups=1, num_stages=4)
    slots = 1 << (top_k - 1).bit_length()
    if combine:
        down = DecodeGemm(block_n(hidden_size, 1), split=max(1, 16 // slots), groups=1, num_stages=3)
    else:
        down = DecodeGemm(block_n(hidden_size, num_pairs), split=4, groups=1, num_stages=4)
    return DecodeConfig(gate_up, down, combine, pdl=arch in _PDL_FAMILIES)


def choose_split(num_blocks: int, steps: int, sm_count: int) -> int:
    """How many programs share an output block along its ``steps`` of K, so that a few tokens fill the device.

    Three programs an SM are wanted even if short ones, twelve if each keeps a long way to go. None is left without
    a step.
    """
    short = min(round(3 * sm_count / num_blocks), steps // 2)
    long = min(round(12 * sm_count / num_blocks), steps // 20)
    split = max(1, min(max(short, long), 8))
    return -(-steps // -(-steps // split))


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
