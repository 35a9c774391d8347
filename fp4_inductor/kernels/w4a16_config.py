"""Block shapes of the W4A16 kernels by tokens an expert and device family. Measured; imports no triton."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """How one GEMM is cut.

    Attributes:
        block_n: weight rows of a program; a multiple of 64.
        block_k: columns of a step; a multiple of 64.
        hopper: the kernel of ``w4a16_hopper``, for bfloat16; ``block_n`` is 128 with 4 warps or 256 with 8, ``block_k``
            is 64 and ``num_stages`` at least 3.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    hopper: bool = False


@dataclass(frozen=True, slots=True)
class W4A16Config:
    """Both GEMMs; they share the token tiles, whichever kernels run them.

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

    @property
    def hopper(self) -> bool:
        """Whether a kernel of ``w4a16_hopper`` runs one of them."""
        return self.gate_up.hopper or self.down.hopper


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
        late: down may not start before gate_up has multiplied.
        one_token: of down in ``w4a16_one_token``, whose programs have a warp for each chosen expert; None where those
            kernels do not serve.
    """

    gate_up: DecodeGemm
    down: DecodeGemm
    pdl: bool = False
    late: bool = False
    one_token: DecodeGemm | None = None


BLOCK = GemmConfig(block_n=128, block_k=64, num_warps=4, num_stages=4)
_NARROW = GemmConfig(block_n=64, block_k=64, num_warps=4, num_stages=4)
GLUON = GemmConfig(block_n=128, block_k=64, num_warps=4, num_stages=4, hopper=True)
_GLUON_3 = GemmConfig(block_n=128, block_k=64, num_warps=4, num_stages=3, hopper=True)
GLUON_WIDE = GemmConfig(block_n=256, block_k=64, num_warps=8, num_stages=4, hopper=True)


@dataclass(frozen=True, slots=True)
class Cuts:
    """How a GEMM is cut by the columns of its weights: ``long`` from ``columns`` on, below them ``short``."""

    long: GemmConfig
    columns: int
    short: GemmConfig

    def of(self, columns: int) -> GemmConfig:
        return self.long if -(-columns // 64) * 64 >= self.columns else self.short


@dataclass(frozen=True, slots=True)
class Row:
    """What serves up to ``tokens`` tokens an expert, None: any; the rest as in ``W4A16Config``."""

    tokens: int | None
    block_m: int
    min_m: int
    group_m: int
    gate_up: GemmConfig | Cuts
    down: GemmConfig | Cuts
    pdl: bool = False
    e8m0_only: bool = False
    """Weights whose scales are e4m3 take the next row."""

    def config(self, gate_up: GemmConfig, down: GemmConfig) -> W4A16Config:
        return W4A16Config(self.block_m, self.min_m, self.group_m, gate_up, down, self.pdl)


# Swept on an H200 over the layers of gpt-oss, Qwen3-30B-A3B, Mixtral 8x7B and DeepSeek-V3 with 4 to 16384 tokens: see
# NOTES.md. Other families are not measured: they take what fits their shared memory and registers.
_PLAIN_90 = (
    Row(10, 16, 16, 1, BLOCK, BLOCK, pdl=True),
    Row(24, 32, 16, 1, BLOCK, BLOCK, pdl=True),
    Row(110, 64, 16, 1, BLOCK, BLOCK, pdl=True),
    Row(None, 128, 32, 4, BLOCK, BLOCK, pdl=True),
)
# Gluon's kernels need columns enough. From 32 tokens an expert on, time over that of the plain kernel, gate_up and
# down, of mixtral (4096 and 14336 columns), deepseek-v3 (7168, 2048), gpt-oss-120b (2880, 2880) and qwen3-30b-a3b
# (2048, 768):
_HOPPER = (
    Row(3, 8, 8, 1, GLUON, GLUON, pdl=True),
    Row(10, 16, 8, 1, GLUON, GLUON, pdl=True),
    Row(24, 32, 16, 1, GLUON, GLUON, pdl=True),
    # 32 tokens: e8m0 1.01 to 1.16; e4m3 gate_up of deepseek-v3 0.97, gpt-oss-120b 0.91.
    Row(48, 64, 16, 1, BLOCK, BLOCK, pdl=True, e8m0_only=True),
    # 64 tokens: mixtral 0.91, 0.81; qwen3-30b-a3b 0.94, 1.05.
    Row(110, 64, 16, 1, GLUON, Cuts(GLUON, 4096, BLOCK), pdl=True),
    # 128 tokens: deepseek-v3 0.86, 1.03; gpt-oss-120b 0.95, 1.06. 256: mixtral 0.87, 0.88; qwen3-30b-a3b 0.86, 1.12.
    Row(400, 128, 32, 4, _GLUON_3, Cuts(_GLUON_3, 4096, BLOCK), pdl=True),
    # 512 tokens: deepseek-v3 0.88, 0.94; gpt-oss-120b 0.93, 0.96. 1024: mixtral 0.88, 0.94; qwen3-30b-a3b 0.92, 1.10.
    # _GLUON_3 in the place of GLUON_WIDE: mixtral 0.90, 0.96, deepseek-v3 0.99, 0.96.
    Row(None, 128, 32, 4, Cuts(GLUON_WIDE, 4096, _GLUON_3), Cuts(GLUON_WIDE, 2048, BLOCK), pdl=True),
)
_UP_TO_64 = (
    Row(10, 16, 16, 1, BLOCK, BLOCK),
    Row(24, 32, 16, 1, BLOCK, BLOCK),
    Row(None, 64, 16, 1, BLOCK, BLOCK),
)
# On sm_100 a block of 128 x 128 spills registers; half as wide it does not.
_BLACKWELL = (
    *_UP_TO_64[:2],
    Row(192, 64, 16, 1, BLOCK, BLOCK),
    Row(None, 128, 32, 16, BLOCK, _NARROW),
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
"""Configurations by ``DeviceInfo.arch``, fewest tokens first."""
_WITHOUT_GLUON = FAMILIES | {90: _PLAIN_90}


def choose_config(
    arch: int, num_pairs: int, num_experts: int, columns: tuple[int, int], *, e4m3: bool, hopper: bool = True
) -> W4A16Config:
    """The configuration for ``num_pairs`` routed pairs spread evenly over the experts.

    Args:
        columns: of the weights of gate_up and of down, padded to 64 or not.
        e4m3: what the weights' scales are, otherwise e8m0.
        hopper: kernels of ``w4a16_hopper`` may run.
    """
    tokens = num_pairs / num_experts
    for row in (FAMILIES if hopper else _WITHOUT_GLUON)[arch]:
        if (row.tokens is None or tokens <= row.tokens) and not (e4m3 and row.e8m0_only):
            cuts = zip((row.gate_up, row.down), columns, strict=True)
            return row.config(*(cut.of(size) if isinstance(cut, Cuts) else cut for cut, size in cuts))
    raise AssertionError("the last row has no limit")


_DECODE_TOKENS = {90: 4}
"""Tokens up to which a family runs the kernels for few tokens, which take 8. Measured on an H200 over the layers of
gpt-oss, Qwen3-30B-A3B and Mixtral 8x7B, as are the two below; other families are not."""
_DECODE_WARPS = 5.5
"""Warps a multiprocessor that a GEMM for few tokens should have at least."""
_DECODE_STEPS = 16
"""Steps that a warp of it should make at most."""
_WIDE_PROGRAMS = 5
"""Programs of 64 rows a multiprocessor from which a GEMM for two tokens and more has such."""
_ONE_WARP = (9, 12)
"""From how many on, and up to how many, which then all run at once, they are of one warp."""
_LONG = 2560
"""Columns from which they take two groups a step."""
_ONE_TOKEN_WEIGHTS = 40_000_000
"""Weights of the chosen experts up to which one token takes two launches: with 19 million 14.1 -> 10.0 us, with 38
(Qwen3-30B-A3B) 15.1 -> 13.7, with 50 15.8 -> 16.2; from there on the programs of down are too few or uneven."""
_ONE_TOKEN_SLOTS = (4, 8)
"""Experts of a token, each a warp of down, with which it does: ten would leave six of sixteen idle."""


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
        wide = num_pairs * -(-rows // 64) / sm_count
        if num_tokens > 1 and wide >= _WIDE_PROGRAMS:
            if _ONE_WARP[0] <= wide <= _ONE_WARP[1]:
                return DecodeGemm(block_n=64, split=1, groups=1, num_stages=6)
            long = columns >= _LONG
            return DecodeGemm(block_n=64, split=2, groups=1 + long, num_stages=4 - long)
        programs = num_pairs * -(-rows // 32)
        enough = (s for s in (2, 4) if programs * s >= _DECODE_WARPS * sm_count and columns <= s * 128 * _DECODE_STEPS)
        split = next(enough, 8)
        return DecodeGemm(block_n=32, split=split, groups=2, num_stages=4 if split == 2 else 3)

    # With one token the start of down counts; with more its programs, waiting, would take the place of gate_up's.
    weights = top_k * (gate_up[0] * gate_up[1] + down[0] * down[1])
    alone = num_tokens == 1 and top_k in _ONE_TOKEN_SLOTS and weights <= _ONE_TOKEN_WEIGHTS
    return DecodeConfig(
        gemm(*gate_up),
        gemm(*down),
        pdl=arch >= 90,
        late=num_tokens > 1,
        one_token=DecodeGemm(block_n=16, split=1, groups=2, num_stages=3) if alone else None,
    )


def choose_split(num_blocks: int, steps: int, sm_count: int, hopper: bool = False) -> int:
    """How many programs share an output block along its ``steps`` of K, so that a few tokens fill the device.

    Three programs an SM are wanted even if short ones, twelve (``hopper`` ones: six) if each keeps a long way to
    go. None is left without a step.
    """
    short = min(round(3 * sm_count / num_blocks), steps // 2)
    long = min(round((6 if hopper else 12) * sm_count / num_blocks), steps // 20)
    split = max(1, min(max(short, long), 8))
    return -(-steps // -(-steps // split))


def choose_stages(num_stages: int, steps: int, block_m: int, e4m3: bool) -> int:
    """Buffers of a ``hopper`` program, which makes whole turns of them: one more where that leaves no step empty.

    Not where few would be. Nor for 64 tokens and e8m0, where it takes 177 registers instead of 163, and two programs
    run on a multiprocessor instead of three.
    """
    wasted = 64 * (-steps % num_stages) > steps
    whole = steps % (num_stages + 1) == 0
    return num_stages + (wasted and whole and (block_m != 64 or e4m3))


def choose_group(config: W4A16Config, expert_bytes: int) -> int:
    """How many token tiles share one piece of the weights: more where an expert's weights crowd out the L2 cache."""
    return max(config.group_m, 16) if config.block_m >= 64 and expert_bytes > _LARGE_EXPERT else config.group_m


def configs(arch: int) -> tuple[W4A16Config, ...]:
    """Every configuration of a device family."""

    def every(cut: GemmConfig | Cuts) -> tuple[GemmConfig, ...]:
        return (cut.short, cut.long) if isinstance(cut, Cuts) else (cut,)

    rows = (*FAMILIES[arch], *_WITHOUT_GLUON[arch])
    found = (row.config(*cuts) for row in rows for cuts in product(every(row.gate_up), every(row.down)))
    return tuple(dict.fromkeys(found))


def shared_memory(config: W4A16Config) -> int:
    """Bytes of shared memory a program needs at most: one buffer of tokens, words and scales a stage."""

    def need(gemm: GemmConfig) -> int:
        tokens = config.block_m * gemm.block_k * 2
        packed = gemm.block_n * (gemm.block_k // 2 + gemm.block_k // 16)
        return (gemm.num_stages + gemm.hopper) * (tokens + packed)

    return max(need(config.gate_up), need(config.down)) + _BARRIERS
