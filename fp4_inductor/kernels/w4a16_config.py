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
        hopper: the kernels of ``w4a16_hopper``, for bfloat16; each GEMM's ``block_n`` is 128 with 4 warps or 256 with
            8, ``block_k`` is 64 and ``num_stages`` at least 3.
    """

    block_m: int
    min_m: int
    group_m: int
    gate_up: GemmConfig
    down: GemmConfig
    pdl: bool = False
    hopper: bool = False


@dataclass(frozen=True, slots=True)
class DecodeGemm:
    """How one GEMM of the kernels for few tokens is cut.

    Attributes:
        block_n: weight rows of a program: 16, 32 or 64.
        split: warps of a program, which share K.
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
        pdl: a kernel may start while the one before it still runs.
    """

    gate_up: DecodeGemm
    down: DecodeGemm
    pdl: bool = False


_BLOCK = GemmConfig(block_n=128, block_k=64, num_warps=4, num_stages=4)
_SHALLOW = GemmConfig(block_n=128, block_k=64, num_warps=4, num_stages=3)
_NARROW = GemmConfig(block_n=64, block_k=64, num_warps=4, num_stages=4)

# Largest expected tokens an expert, and the tile that serves them. Swept on an H200 over the layers of gpt-oss,
# Qwen3-30B-A3B, Mixtral 8x7B and DeepSeek-V3 with 4 to 16384 tokens: see NOTES.md. Other families are not measured:
# they take what fits their shared memory and registers.
_HOPPER = (
    (3, W4A16Config(8, 8, 1, _BLOCK, _BLOCK, pdl=True, hopper=True)),
    (10, W4A16Config(16, 16, 1, _BLOCK, _BLOCK, pdl=True, hopper=True)),
    (24, W4A16Config(32, 32, 1, _BLOCK, _BLOCK, pdl=True, hopper=True)),
    (110, W4A16Config(64, 16, 1, _BLOCK, _BLOCK, pdl=True, hopper=True)),
    (None, W4A16Config(128, 32, 4, _SHALLOW, _SHALLOW, pdl=True, hopper=True)),
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


def choose_config(arch: int, num_pairs: int, num_experts: int, hopper: bool = True) -> W4A16Config:
    """The configuration for ``num_pairs`` routed pairs spread evenly over the experts; ``hopper`` ones only if so."""
    tokens = num_pairs / num_experts
    for limit, config in FAMILIES[arch]:
        if (limit is None or tokens <= limit) and (hopper or not config.hopper):
            return config
    raise AssertionError("the last row has no limit")


_DECODE_TOKENS = {90: 4}
"""Tokens up to which a family runs the kernels for few tokens, which take 8. Measured on an H200 over the layers of
gpt-oss, Qwen3-30B-A3B and Mixtral 8x7B, as are the two below; other families are not."""
_DECODE_WARPS = 7.5
"""Warps a multiprocessor that a GEMM for few tokens should have at least."""
_DECODE_STEPS = 16
"""Steps that a warp of it should make at most."""


def choose_decode(
    arch: int,
    sm_count: int,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    gate_up: tuple[int, int],
    down: tuple[int, int],
) -> DecodeConfig | None:
    """The configuration of the kernels for few tokens; None where tokens are many, or would often share an expert.

    ``gate_up`` and ``down`` are rows and columns of the weights.
    """
    num_pairs = num_tokens * top_k
    if num_tokens > _DECODE_TOKENS.get(arch, 0) or 2 * num_pairs > num_experts:
        return None

    def gemm(rows: int, columns: int) -> DecodeGemm:
        programs = num_pairs * -(-rows // 32)
        enough = (s for s in (2, 4) if programs * s >= _DECODE_WARPS * sm_count and columns <= s * 128 * _DECODE_STEPS)
        split = next(enough, 8)
        return DecodeGemm(block_n=32, split=split, groups=2, num_stages=4 if split == 2 else 3)

    return DecodeConfig(gemm(*gate_up), gemm(*down), pdl=arch >= 90)


def choose_split(num_blocks: int, steps: int, sm_count: int, hopper: bool = False) -> int:
    """How many programs share an output block along its ``steps`` of K, so that a few tokens fill the device.

    Three programs an SM are wanted even if short ones, twelve (``hopper`` ones: six) if each keeps a long way to
    go. None is left without a step.
    """
    short = min(round(3 * sm_count / num_blocks), steps // 2)
    long = min(round((6 if hopper else 12) * sm_count / num_blocks), steps // 20)
    split = max(1, min(max(short, long), 8))
    return -(-steps // -(-steps // split))


def choose_stages(num_stages: int, steps: int) -> int:
    """Buffers of a ``hopper`` program, which makes whole turns of them: one more where that leaves no step empty."""
    return num_stages + (steps % num_stages != 0 and steps % (num_stages + 1) == 0)


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
        return (gemm.num_stages + config.hopper) * (tokens + packed)

    return max(need(config.gate_up), need(config.down)) + _BARRIERS
