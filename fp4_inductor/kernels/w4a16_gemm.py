"""The three GEMM-side kernels of a W4A16 experts block, in Triton.

Weights are the left, wide operand and tokens the right one, so that few tokens waste little of a matrix
instruction, and a weight goes from its word to the register that the instruction reads. Layouts:
``layouts/lane_words.py``, ``layouts/lane_scales.py`` and, for rows of gate and up, the granules of
``layouts/gate_up.py``. Both dimensions of a weight are padded to 64.

Shapes: P = T*k routed pairs, sorted by expert; G = ceil(K/64) groups; R row tiles of 64.
"""

# Triton reads these functions itself; they hold no Python types.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_ROWS = tl.constexpr(64)
_GROUP = tl.constexpr(64)
_PLANE = tl.constexpr(16)
_GRANULE = tl.constexpr(8)
_LINE = tl.constexpr(128)
"""Bytes of a cache line."""


@triton.jit
def _bf16_planes(words, s0, s1, s2, s3):
    """Planes of two words at a time, each times its scale; a lane word's bits need no other change."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, z;
        mov.b32 z, 0x80008000;
        and.b32 $0, $4, 0x81C081C0;
        shl.b32 a, $4, 3;
        and.b32 $1, a, 0x81C081C0;
        shl.b32 a, $4, 6;
        and.b32 $2, a, 0x81C081C0;
        shl.b32 a, $4, 1;
        and.b32 a, a, 0x80008000;
        shr.b32 b, $4, 4;
        lop3.b32 a, b, 0x00C000C0, a, 0xEA;
        shr.b32 b, $4, 5;
        lop3.b32 $3, b, 0x01000100, a, 0xEA;
        fma.rn.bf16x2 $0, $0, $5, z;
        fma.rn.bf16x2 $1, $1, $7, z;
        fma.rn.bf16x2 $2, $2, $9, z;
        fma.rn.bf16x2 $3, $3, $11, z;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
        args=[words, s0, s1, s2, s3],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _lanes(words, PLANE: tl.constexpr):
    """int32 lane bits, sign at 15 and magnitude at 8..6, of one plane of int32 words."""
    if PLANE == 3:
        return ((words << 1) & 0x8000) | ((words >> 4) & 0x00C0) | ((words >> 5) & 0x0100)
    return (words << (3 * PLANE)) & 0x81C0


@triton.jit
def _scaled(lanes, scale, DTYPE: tl.constexpr):
    """Lanes times scales, in ``DTYPE``, through float32: the same values as the packed form, in plain operations."""
    scale = scale & 0xFFFF
    if DTYPE.is_fp16():
        lanes = (lanes & 0x8000) | ((lanes & 0x01C0) << 3)
        value = lanes.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        factor = scale.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = (lanes << 16).to(tl.float32, bitcast=True)
        factor = (scale << 16).to(tl.float32, bitcast=True)
    return (value * factor).to(DTYPE)


@triton.jit
def _scale_lanes(byte, E4M3: tl.constexpr, DTYPE: tl.constexpr):
    """A scale byte as two equal lanes of an int32."""
    if E4M3 and DTYPE.is_bf16():
        lanes = byte * 0x00100010 + 0x75807580
    elif E4M3:
        lanes = byte * 0x00800080 + 0x2C002C00
    elif DTYPE.is_bf16():
        lanes = byte * 0x00800080
    else:
        lanes = tl.maximum(byte - 224, 0) * 0x04000400
    return lanes


@triton.jit
def _weights(words, scales, E4M3: tl.constexpr, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """A weight tile [n, K] in ``DTYPE`` from words int16 [n, K/4] and scale words int32 [n or n/2, K/64]."""
    ROWS: tl.constexpr = words.shape[0]
    GROUPS: tl.constexpr = words.shape[1] // _PLANE
    words = words.reshape(ROWS, GROUPS, _PLANE)
    if not E4M3:  # a word is two bytes of a row, then two of the row eight below
        pairs = tl.join(scales, scales >> 16).reshape(ROWS // 16, 8, GROUPS, 2)
        scales = pairs.permute(0, 3, 1, 2).reshape(ROWS, GROUPS)
    shape: tl.constexpr = [ROWS, GROUPS, _PLANE]
    b0 = _scale_lanes(scales & 0xFF, E4M3, DTYPE)
    b1 = _scale_lanes((scales >> 8) & 0xFF, E4M3, DTYPE)
    if E4M3:
        b2 = _scale_lanes((scales >> 16) & 0xFF, E4M3, DTYPE)
        b3 = _scale_lanes((scales >> 24) & 0xFF, E4M3, DTYPE)
        s0, s1, s2, s3 = b0, b1, b2, b3
    else:
        s0, s1, s2, s3 = b0, b0, b1, b1
    s0 = tl.expand_dims(s0, 2).broadcast_to(shape)
    s1 = tl.expand_dims(s1, 2).broadcast_to(shape)
    s2 = tl.expand_dims(s2, 2).broadcast_to(shape)
    s3 = tl.expand_dims(s3, 2).broadcast_to(shape)
    if DTYPE.is_bf16() and not INTERPRETED:
        p0, p1, p2, p3 = _bf16_planes(words, s0, s1, s2, s3)
    else:
        wide = words.to(tl.int32) & 0xFFFF
        p0 = _scaled(_lanes(wide, 0), s0, DTYPE)
        p1 = _scaled(_lanes(wide, 1), s1, DTYPE)
        p2 = _scaled(_lanes(wide, 2), s2, DTYPE)
        p3 = _scaled(_lanes(wide, 3), s3, DTYPE)
    # Only names of registers move here: columns become [group, plane, word].
    planes = tl.join(tl.join(p0, p2), tl.join(p1, p3))
    return planes.permute(0, 1, 3, 4, 2).reshape(ROWS, GROUPS * 4 * _PLANE)


@triton.jit
def _load_weights(
    words,
    scales,
    row,
    end_row,
    group,
    num_groups,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,
    E4M3: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A weight tile [BLOCK_N, BLOCK_K] of one expert, from row ``row`` and column ``64 * group``.

    ``row`` and ``end_row`` are multiples of 64; past ``end_row`` the last 64 rows repeat. Groups past the last
    are zero unless WHOLE.
    """
    SCALE_ROWS: tl.constexpr = _ROWS if E4M3 else _ROWS // 2
    last_tile = end_row // _ROWS - 1
    n = tl.arange(0, BLOCK_N)
    tile = tl.minimum(row // _ROWS + n // _ROWS, last_tile) * num_groups
    word = tl.arange(0, BLOCK_K // 4)
    word_group = group + word // _PLANE
    offset = (tile * (_ROWS * _PLANE) + (n % _ROWS) * _PLANE)[:, None]
    offset = offset + (word_group * (_ROWS * _PLANE) + word % _PLANE)[None, :]
    n = tl.arange(0, BLOCK_N // (_ROWS // SCALE_ROWS))
    tile = tl.minimum(row // _ROWS + n // SCALE_ROWS, last_tile) * num_groups
    scale_group = group + tl.arange(0, BLOCK_K // _GROUP)
    scale_offset = (tile * SCALE_ROWS + n % SCALE_ROWS)[:, None] + (scale_group * SCALE_ROWS)[None, :]
    if WHOLE:
        w = tl.load(words + offset)
        s = tl.load(scales + scale_offset)
    else:
        w = tl.load(words + offset, mask=(word_group < num_groups)[None, :], other=0)
        s = tl.load(scales + scale_offset, mask=(scale_group < num_groups)[None, :], other=0)
    return _weights(w, s, E4M3, DTYPE, INTERPRETED)


@triton.jit
def _load_tokens(tokens, column, K, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr):
    """[BLOCK_K, m] of row pointers ``tokens`` [m], columns from ``column``; zero past K unless WHOLE."""
    k = column + tl.arange(0, BLOCK_K)
    if WHOLE:
        x = tl.load(tokens[None, :] + k[:, None])
    else:
        x = tl.load(tokens[None, :] + k[:, None], mask=(k < K)[:, None], other=0.0)
    return x


@triton.jit
def _dot(w, x, acc, INTERPRETED: tl.constexpr):
    if INTERPRETED:  # the interpreter multiplies bfloat16 bits as integers
        return tl.dot(w.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(w, x, acc)


@triton.jit
def _cast(x, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """float32 rounded to nearest even."""
    if INTERPRETED and DTYPE.is_bf16():  # the interpreter truncates
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def _softcap(x, limit):
    """``limit * tanh(x / limit)``."""
    z = x / limit
    large = 1 - 2 / (1 + tl.exp(2 * z))  # loses digits where it nearly cancels
    return limit * tl.where(tl.abs(z) < 0.04, z - z * z * z * (1 / 3), large)


@triton.jit
def _act(x, factor, alpha, KIND: tl.constexpr):
    """float32 ``factor * s(x)``, which is the activation of x where the factor is x; as ``spec.ActivationSpec``."""
    if KIND == "silu":
        y = factor / (1 + tl.exp(-alpha * x))
    elif KIND == "gelu":
        y = 0.5 * factor * (1 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        y = factor / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif KIND == "relu":
        y = tl.where(x > 0, factor, 0.0)
    else:
        tl.static_assert(KIND == "relu2")
        y = factor * tl.maximum(x, 0.0)
    return y


@triton.jit
def _activated(gate, limit, alpha, BOUND: tl.constexpr, KIND: tl.constexpr):
    """float32 activation of a gate bounded by ``limit``."""
    if BOUND == "softcap":
        y = _act(gate, _softcap(gate, limit), alpha, KIND)
    elif BOUND == "clamp_activated":
        y = tl.minimum(_act(gate, gate, alpha, KIND), limit)
    elif BOUND == "clamp":
        gate = tl.minimum(gate, limit)
        y = _act(gate, gate, alpha, KIND)
    else:
        tl.static_assert(BOUND == "none")
        y = _act(gate, gate, alpha, KIND)
    return y


@triton.jit
def _bounded_up(up, limit, BOUND: tl.constexpr):
    """float32 up, bounded by ``limit``."""
    if BOUND == "softcap":
        up = _softcap(up, limit)
    elif BOUND != "none":
        up = tl.minimum(tl.maximum(up, -limit), limit)
    return up


@triton.jit
def _place_block(block, tiles, blocks, GROUP_M: tl.constexpr):
    """Token tile and row block of an output block: GROUP_M tiles in turn for each row block, which stays in L2."""
    span = GROUP_M * blocks
    first = block // span * GROUP_M
    size = tl.minimum(tiles - first, GROUP_M)
    return first + block % span % size, block % span // size


@triton.jit
def _split_range(K, split, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr):
    """Columns [first, end) of one of SPLIT_K programs that share an output tile."""
    columns = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    return split * columns, tl.minimum(split * columns + columns, K)


@triton.jit
def _arrive(arrivals, block, SPLIT_K: tl.constexpr):
    """Whether this program is the last of SPLIT_K to have stored its part of ``block``."""
    tl.debug_barrier()
    last = tl.atomic_add(arrivals + block, 1, sem="acq_rel") == SPLIT_K - 1
    if last:  # the next GEMM counts from zero again
        tl.store(arrivals + block, 0)
    return last


@triton.jit
def _part(parts, block, split, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, SPLIT_K: tl.constexpr):
    """Pointers [BLOCK_N, BLOCK_M] to one program's part of a block, float32."""
    start = (block.to(tl.int64) * SPLIT_K + split) * (BLOCK_N * BLOCK_M)
    return parts + start + tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]


@triton.jit
def _sum_parts(parts, block, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, SPLIT_K: tl.constexpr):
    """Parts of a block added in the order of their columns, whichever program was last."""
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for split in tl.static_range(SPLIT_K):
        total += tl.load(_part(parts, block, split, BLOCK_N, BLOCK_M, SPLIT_K), cache_modifier=".cg")
    return total


@triton.jit
def _rows_of_tile(tile, tile_expert, tile_row, expert_end, order, BLOCK_M: tl.constexpr):
    """A token tile's expert (int64), sorted rows, their validity and pairs; rows past the end repeat the last."""
    expert = tl.load(tile_expert + tile)
    end = tl.load(expert_end + expert)
    row = tl.load(tile_row + tile) + tl.arange(0, BLOCK_M)
    pair = tl.load(order + tl.minimum(row, end - 1))
    return expert.to(tl.int64), row, row < end, pair


@triton.jit
def prefetch(pointers):
    """Bring the lines at ``pointers`` into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _prefetch_weights(
    words, scales, row, end_row, group, groups, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, E4M3: tl.constexpr
):
    """Prefetch GROUPS groups from ``group`` of an expert's rows from ``row``, as ``_load_weights`` would read them."""
    LINES: tl.constexpr = _ROWS * _PLANE * 2 // _LINE
    SCALE_LINES: tl.constexpr = 2 if E4M3 else 1
    tile = tl.minimum(row // _ROWS + tl.arange(0, BLOCK_N // _ROWS), end_row // _ROWS - 1) * groups
    line = tl.minimum(group * LINES + tl.arange(0, GROUPS * LINES), groups * LINES - 1)
    prefetch(words + (tile * LINES)[:, None] * (_LINE // 2) + line[None, :] * (_LINE // 2))
    line = tl.minimum(group * SCALE_LINES + tl.arange(0, GROUPS * SCALE_LINES), groups * SCALE_LINES - 1)
    prefetch(scales + (tile * SCALE_LINES)[:, None] * (_LINE // 4) + line[None, :] * (_LINE // 4))


@triton.jit
def _scale_and_bias(acc, row_scale, bias, rows, HAS_BIAS: tl.constexpr):
    """An accumulator [n, m] times the factors of its weight rows, plus their bias."""
    acc *= tl.load(row_scale + rows)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + rows).to(tl.float32)[:, None]
    return acc


@triton.jit
def _gate_and_up(acc):
    """Gate and up [n/2, m] of an accumulator [n, m] whose rows are in granules; each thread has both of a pair."""
    ROWS: tl.constexpr = acc.shape[0]
    COLUMNS: tl.constexpr = acc.shape[1]
    granules = acc.reshape(ROWS // (2 * _GRANULE), 2, _GRANULE, COLUMNS).permute(0, 2, 3, 1)
    gate, up = tl.split(granules)
    return gate.reshape(ROWS // 2, COLUMNS), up.reshape(ROWS // 2, COLUMNS)


@triton.jit
def gate_up_kernel(
    hidden,  # [T, H]
    words,  # int16 [E, R, G, 64, 16]; gated: rows in granules
    scales,  # int32 [E, R, G, 64 or 32]
    row_scale,  # float32 [E, N], N = 64 R
    bias,  # [E, N]
    order,  # int32 [P] pair of a sorted row
    num_tiles,  # int32 [1]
    tile_expert,  # int32 [tiles]
    tile_row,  # int32 [tiles]
    expert_end,  # int32 [>= E]
    h,  # out: [P, I], sorted rows
    parts,  # scratch where SPLIT_K > 1: float32 [BLOCK_N, BLOCK_M] a program
    arrivals,  # int32 zeros, one a block of h
    top_k,
    H,
    I,  # noqa: E741
    alpha,
    beta,
    limit,
    up_limit,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    WHOLE: tl.constexpr,
    E4M3: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    BOUND: tl.constexpr,
    KIND: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PREFETCH: tl.constexpr = 0,
    PDL: tl.constexpr = False,
):
    """h = act(hidden @ w13) for one token tile and BLOCK_N rows of w13."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    block = tl.program_id(0) // SPLIT_K
    split = tl.program_id(0) % SPLIT_K
    N = I * 2 if GATED else I
    blocks = tl.cdiv(N, BLOCK_N)
    tiles = tl.load(num_tiles)
    if block >= tiles * blocks:
        return
    tile, row_block = _place_block(block, tiles, blocks, GROUP_M)
    DTYPE: tl.constexpr = hidden.dtype.element_ty
    expert, row, valid, pair = _rows_of_tile(tile, tile_expert, tile_row, expert_end, order, BLOCK_M)
    first_row = row_block * BLOCK_N
    groups = tl.cdiv(H, _GROUP)
    words += expert * (N * groups * _PLANE)
    scales += expert * (N * groups // (1 if E4M3 else 2))
    tokens = hidden + (pair // top_k).to(tl.int64) * H

    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    first, end = _split_range(H, split, BLOCK_K, SPLIT_K)
    if PREFETCH > 0:
        _prefetch_weights(words, scales, first_row, N, first // _GROUP, groups, BLOCK_N, PREFETCH, E4M3)
    for k in range(first, end, BLOCK_K):
        x = _load_tokens(tokens, k, H, BLOCK_K, WHOLE)
        w = _load_weights(
            words, scales, first_row, N, k // _GROUP, groups, BLOCK_N, BLOCK_K, WHOLE, E4M3, DTYPE, INTERPRETED
        )
        acc = _dot(w, x, acc, INTERPRETED)
    if SPLIT_K > 1:
        tl.store(_part(parts, block, split, BLOCK_N, BLOCK_M, SPLIT_K), acc)
        if not _arrive(arrivals, block, SPLIT_K):
            return
        acc = _sum_parts(parts, block, BLOCK_N, BLOCK_M, SPLIT_K)

    n = tl.minimum(first_row + tl.arange(0, BLOCK_N), N - 1)
    acc = _scale_and_bias(acc, row_scale + expert * N, bias + expert * N, n, HAS_BIAS)
    if GATED:
        gate, up = _gate_and_up(acc)
        out = _activated(gate, limit, alpha, BOUND, KIND) * (_bounded_up(up, up_limit, BOUND) + beta)
        i = first_row // 2 + tl.arange(0, BLOCK_N // 2)
    else:
        out = _activated(acc, limit, alpha, BOUND, KIND)
        i = first_row + tl.arange(0, BLOCK_N)
    pointers = h + row.to(tl.int64)[None, :] * I + i[:, None]
    tl.store(pointers, _cast(out, DTYPE, INTERPRETED), mask=(i < I)[:, None] & valid[None, :])


@triton.jit
def down_kernel(
    h,  # [P, I] sorted rows
    words,  # int16 [E, R, G, 64, 16]
    scales,  # int32 [E, R, G, 64 or 32]
    row_scale,  # float32 [E, N], N = H padded to 64
    bias,  # [E, H]
    topk_weights,  # [P]
    order,
    num_tiles,
    tile_expert,
    tile_row,
    expert_end,
    y,  # out: [P, H], by pair
    parts,
    arrivals,
    H,
    I,  # noqa: E741
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    WHOLE: tl.constexpr,
    E4M3: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PREFETCH: tl.constexpr = 0,
    PDL: tl.constexpr = False,
):
    """y = topk_weight * (h @ w2 + bias) for one token tile and BLOCK_N output columns."""
    block = tl.program_id(0) // SPLIT_K
    split = tl.program_id(0) % SPLIT_K
    blocks = tl.cdiv(H, BLOCK_N)
    tiles = tl.load(num_tiles)  # gate_up waited for the route before this kernel could start
    if block >= tiles * blocks:
        if PDL:
            gdc_wait()
        return
    tile, row_block = _place_block(block, tiles, blocks, GROUP_M)
    DTYPE: tl.constexpr = h.dtype.element_ty
    expert, row, valid, pair = _rows_of_tile(tile, tile_expert, tile_row, expert_end, order, BLOCK_M)
    first_row = row_block * BLOCK_N
    n = first_row + tl.arange(0, BLOCK_N)
    N = tl.cdiv(H, _ROWS) * _ROWS
    groups = tl.cdiv(I, _GROUP)
    words += expert * (N * groups * _PLANE)
    scales += expert * (N * groups // (1 if E4M3 else 2))
    rows = h + tl.where(valid, row, row - tl.arange(0, BLOCK_M)).to(tl.int64) * I

    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    first, end = _split_range(I, split, BLOCK_K, SPLIT_K)
    if PREFETCH > 0:
        _prefetch_weights(words, scales, first_row, N, first // _GROUP, groups, BLOCK_N, PREFETCH, E4M3)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for k in range(first, end, BLOCK_K):
        x = _load_tokens(rows, k, I, BLOCK_K, WHOLE)
        w = _load_weights(
            words, scales, first_row, N, k // _GROUP, groups, BLOCK_N, BLOCK_K, WHOLE, E4M3, DTYPE, INTERPRETED
        )
        acc = _dot(w, x, acc, INTERPRETED)
    if SPLIT_K > 1:
        tl.store(_part(parts, block, split, BLOCK_N, BLOCK_M, SPLIT_K), acc)
        if not _arrive(arrivals, block, SPLIT_K):
            return
        acc = _sum_parts(parts, block, BLOCK_N, BLOCK_M, SPLIT_K)

    n_read = tl.minimum(n, H - 1)
    acc = _scale_and_bias(acc, row_scale + expert * N, bias + expert * H, n_read, HAS_BIAS)
    acc *= tl.load(topk_weights + pair).to(tl.float32)[None, :]
    pointers = y + pair.to(tl.int64)[None, :] * H + n[:, None]
    tl.store(pointers, _cast(acc, y.dtype.element_ty, INTERPRETED), mask=(n < H)[:, None] & valid[None, :])


@triton.jit
def combine_kernel(
    y,  # [P, H] by pair
    topk_ids,  # [P]
    out,  # out: [T, H]
    H,
    num_experts,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """out[t] = sum over slots of y[t, slot], in slot order and float32; slots without an expert are not read."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        expert = tl.load(topk_ids + pair)
        end = tl.where((expert >= 0) & (expert < num_experts), H, 0)
        total += tl.load(y + pair * H + column, mask=column < end, other=0.0).to(tl.float32)
    tl.store(out + token * H + column, _cast(total, out.dtype.element_ty, INTERPRETED), mask=column < H)
