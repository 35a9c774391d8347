"""What the W4A16 kernels do with one tile: load and decode weights, multiply, activate, round. In Triton.

Layouts: ``layouts/lane_words.py``, ``layouts/lane_scales.py`` and, for rows of gate and up, the granules of
``layouts/gate_up.py``. Both dimensions of a weight are padded to 64.
"""

# Triton reads these functions itself; they hold no Python types.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

ROWS = tl.constexpr(64)
GROUP = tl.constexpr(64)
PLANE = tl.constexpr(16)
_GRANULE = tl.constexpr(8)


@triton.jit
def place_block(block, tiles, blocks, GROUP_M: tl.constexpr):
    """Token tile and row block of an output block: GROUP_M tiles in turn for each row block, which stays in L2."""
    span = GROUP_M * blocks
    first = block // span * GROUP_M
    size = tl.minimum(tiles - first, GROUP_M)
    return first + block % span % size, block % span // size


@triton.jit
def narrowed(run: tl.constexpr, rows, BLOCK_M: tl.constexpr, MIN_M: tl.constexpr, args):
    """``run`` for the fewest tokens of BLOCK_M, BLOCK_M / 2, ... MIN_M that ``rows`` fit."""
    HALF: tl.constexpr = BLOCK_M // 2
    if HALF >= MIN_M:
        if rows <= HALF:
            narrowed(run, rows, HALF, MIN_M, args)
        else:
            run(BLOCK_M, *args)
    else:
        run(BLOCK_M, *args)


@triton.jit
def bf16_planes(words, s0, s1, s2, s3):
    """Planes of two words at a time, each times its scale; a lane word's bits need no other change."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, z;
        mov.b32 z, 0x80008000;
        and.b32 $0, $4, 0x81C081C0;
        shl.b32 a, $4, 6;
        and.b32 $1, a, 0x81C081C0;
        shf.l.wrap.b32 a, $4, $4, 10;
        and.b32 $2, a, 0x81C081C0;
        shl.b32 a, $4, 4;
        shr.b32 b, $4, 4;
        and.b32 b, b, 0x00400040;
        lop3.b32 $3, a, 0x81808180, b, 0xEA;
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
def _lanes(words, neighbours, PLANE: tl.constexpr):
    """int32 lane bits, sign at 15 and magnitude at 8..6, of one plane of int32 words."""
    if PLANE == 0:
        lanes = words & 0x81C0
    elif PLANE == 1:
        lanes = (words << 6) & 0x81C0
    elif PLANE == 2:
        lanes = ((words << 10) & 0x8000) | ((neighbours >> 6) & 0x01C0)
    else:
        lanes = ((words << 4) & 0x8180) | ((words >> 4) & 0x0040)
    return lanes


@triton.jit
def _neighbours(words):
    """Words [n, groups, 16] with each pair swapped."""
    even, odd = tl.split(words.reshape(words.shape[0], words.shape[1], words.shape[2] // 2, 2))
    return tl.join(odd, even).reshape(words.shape[0], words.shape[1], words.shape[2])


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
def decode_weights(words, scales, E4M3: tl.constexpr, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """A weight tile [n, K] in ``DTYPE`` from words int16 [n, K/4] and scale words int32 [n or n/2, K/64]."""
    ROWS: tl.constexpr = words.shape[0]
    GROUPS: tl.constexpr = words.shape[1] // PLANE
    words = words.reshape(ROWS, GROUPS, PLANE)
    if not E4M3:  # a word is two bytes of a row, then two of the row eight below
        pairs = tl.join(scales, scales >> 16).reshape(ROWS // 16, 8, GROUPS, 2)
        scales = pairs.permute(0, 3, 1, 2).reshape(ROWS, GROUPS)
    shape: tl.constexpr = [ROWS, GROUPS, PLANE]
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
        p0, p1, p2, p3 = bf16_planes(words, s0, s1, s2, s3)
    else:
        wide = words.to(tl.int32) & 0xFFFF
        other = _neighbours(wide)
        p0 = _scaled(_lanes(wide, other, 0), s0, DTYPE)
        p1 = _scaled(_lanes(wide, other, 1), s1, DTYPE)
        p2 = _scaled(_lanes(wide, other, 2), s2, DTYPE)
        p3 = _scaled(_lanes(wide, other, 3), s3, DTYPE)
    # Only names of registers move here: columns become [group, plane, word].
    planes = tl.join(tl.join(p0, p2), tl.join(p1, p3))
    return planes.permute(0, 1, 3, 4, 2).reshape(ROWS, GROUPS * 4 * PLANE)


@triton.jit
def rows_of_tile(tile, tile_expert, tile_row, expert_end):
    """Expert (int64) and first sorted row of a token tile, and the expert's last row + 1."""
    expert = tl.load(tile_expert + tile)
    return expert.to(tl.int64), tl.load(tile_row + tile), tl.load(expert_end + expert)


@triton.jit
def weights_of_expert(words, scales, row_scale, bias, expert, N, num_bias, K, E4M3: tl.constexpr):
    """An expert's words, scale words, row factors and biases."""
    groups = tl.cdiv(K, GROUP)
    words += expert * (N * groups * PLANE)
    scales += expert * (N * groups // (1 if E4M3 else 2))
    return words, scales, row_scale + expert * N, bias + expert * num_bias


@triton.jit
def load_weights(
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
    SCALEROWS: tl.constexpr = ROWS if E4M3 else ROWS // 2
    last_tile = end_row // ROWS - 1
    n = tl.arange(0, BLOCK_N)
    tile = tl.minimum(row // ROWS + n // ROWS, last_tile) * num_groups
    word = tl.arange(0, BLOCK_K // 4)
    word_group = group + word // PLANE
    offset = (tile * (ROWS * PLANE) + (n % ROWS) * PLANE)[:, None]
    offset = offset + (word_group * (ROWS * PLANE) + word % PLANE)[None, :]
    n = tl.arange(0, BLOCK_N // (ROWS // SCALEROWS))
    tile = tl.minimum(row // ROWS + n // SCALEROWS, last_tile) * num_groups
    scale_group = group + tl.arange(0, BLOCK_K // GROUP)
    scale_offset = (tile * SCALEROWS + n % SCALEROWS)[:, None] + (scale_group * SCALEROWS)[None, :]
    if WHOLE:
        w = tl.load(words + offset)
        s = tl.load(scales + scale_offset)
    else:
        w = tl.load(words + offset, mask=(word_group < num_groups)[None, :], other=0)
        s = tl.load(scales + scale_offset, mask=(scale_group < num_groups)[None, :], other=0)
    return decode_weights(w, s, E4M3, DTYPE, INTERPRETED)


@triton.jit
def load_tokens(tokens, column, K, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr):
    """[BLOCK_K, m] of row pointers ``tokens`` [m], columns from ``column``; zero past K unless WHOLE."""
    k = column + tl.arange(0, BLOCK_K)
    if WHOLE:
        x = tl.load(tokens[None, :] + k[:, None])
    else:
        x = tl.load(tokens[None, :] + k[:, None], mask=(k < K)[:, None], other=0.0)
    return x


@triton.jit
def dot(w, x, acc, INTERPRETED: tl.constexpr):
    """``acc + w @ x`` in float32, done before anything after it.

    On sm_90 w is an operand in registers of an asynchronous instruction. Triton 3.6 would leave the last ones
    running while the next step of a loop writes those registers; that the sum is read here makes it wait.
    """
    if INTERPRETED:  # the interpreter multiplies bfloat16 bits as integers
        return tl.dot(w.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
    acc = tl.dot(w, x, acc)
    return tl.inline_asm_elementwise("// $0", "=f,0", [acc], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def cast(x, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
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
def scale_and_bias(acc, row_scale, bias, rows, HAS_BIAS: tl.constexpr):
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
def activation(acc, knobs, GATED: tl.constexpr, BOUND: tl.constexpr, KIND: tl.constexpr):
    """float32 columns of h from an accumulator [n, m] of rows of w13: [n/2, m] if GATED, else [n, m].

    ``knobs`` are alpha, beta, limit and up_limit of ``spec.ActivationSpec``.
    """
    alpha, beta, limit, up_limit = knobs
    if GATED:
        gate, up = _gate_and_up(acc)
        out = _activated(gate, limit, alpha, BOUND, KIND) * (_bounded_up(up, up_limit, BOUND) + beta)
    else:
        out = _activated(acc, limit, alpha, BOUND, KIND)
    return out
