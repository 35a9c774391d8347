"""What the kernels of ``w4a16_hopper`` do in one step: copy, decode and multiply two weight tiles. In Gluon.

Weight tiles have 16 rows a warp. Layouts of words and scale words: as in ``w4a16_tile``.
"""

# Triton reads these functions itself; they hold no Python types.
# mypy: ignore-errors
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma, warpgroup_mma_wait

from .w4a16_tile import GROUP, PLANE, ROWS, bf16_planes

# Names after Triton 3.6, and those of 3.6.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

WORDS = gl.constexpr(ROWS * PLANE)
"""Words of 64 rows in a group."""
_WORD_SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 4, 2, [1, 0]))
"""Rows of 32 bytes; eight of them, 16 bytes each, lie in different banks."""
_SCALE_SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))
_TOKEN_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.constexpr_function
def _word_copy(warps):
    return gl.BlockedLayout([1, 8], [16, 2], [warps, 1], [1, 0])


@gluon.constexpr_function
def _word_lanes(warps):
    """What four 8 x 8 matrices of ``ldmatrix`` give a thread: pairs of words, so columns, of two rows 8 apart."""
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    warp_rows = [[16, 0], [32, 0], [64, 0]][: 2 if warps == 4 else 3]
    return gl.DistributedLinearLayout([[0, 1], [0, 8], [8, 0]], lanes, warp_rows, [], [16 * warps, PLANE.value])


@gluon.constexpr_function
def _scale_copy(warps):
    return gl.BlockedLayout([1, 1], [1, 32], [2, warps // 2], [1, 0])


@gluon.constexpr_function
def _scale_lanes(warps, e4m3):
    """Scale words [tile, word] of the rows that a thread holds words of."""
    lanes = [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]]
    words = 16 if e4m3 else 8
    warp_words = [[0, words], [0, 2 * words], [0, 4 * words]][: 2 if warps == 4 else 3]
    registers = [[1, 0]] + [[0, 8]] * bool(e4m3)
    return gl.DistributedLinearLayout(registers, lanes, warp_words, [], [2, words * warps])


@gluon.constexpr_function
def token_copy(warps):
    return gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])


@gluon.jit
def _both(pairs, HIGH: gl.constexpr):
    """The low or the high half of a register in both halves; the multiplication that reads it does this itself."""
    ASM: gl.constexpr = (
        "{ .reg .b16 l, h; mov.b32 {l, h}, $1; mov.b32 $0, {h, h}; }"
        if HIGH
        else "{ .reg .b16 l, h; mov.b32 {l, h}, $1; mov.b32 $0, {l, l}; }"
    )
    return gl.inline_asm_elementwise(ASM, "=r,r", args=[pairs], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _scales_beside(scales, words, E4M3: gl.constexpr):
    """The four bytes of scale words [n] as bfloat16 scales beside ``words``, in both halves of int32 [n, 1]."""
    scales = gl.convert_layout(scales, gl.SliceLayout(1, words.type.layout), assert_trivial=True)
    scales = gl.expand_dims(scales, 1)
    even = scales & 0x00FF00FF
    odd = (scales >> 8) & 0x00FF00FF
    if E4M3:
        even = even * 0x10 + 0x75807580
        odd = odd * 0x10 + 0x75807580
    else:
        even *= 0x80
        odd *= 0x80
    return _both(even, False), _both(odd, False), _both(even, True), _both(odd, True)


@gluon.jit
def _decoded(words, upper, lower, OPERAND: gl.constexpr, E4M3: gl.constexpr):
    """bf16 [n, 64] of a weight tile's words [n, 16] and the scale words [n/2] of its rows 0..7 and 8..15 mod 16.

    Where they share a word, ``lower`` is not read. Only names of registers move.
    """
    TILE: gl.constexpr = words.shape[0]
    w0, w1 = gl.split(words.reshape((TILE // 16, 2, 8, PLANE)).permute((0, 2, 3, 1)))
    w0 = w0.reshape((TILE // 2, PLANE))
    w1 = w1.reshape((TILE // 2, PLANE))
    s0, s1, s2, s3 = _scales_beside(upper, w0, E4M3)
    if E4M3:
        p0, p1, p2, p3 = bf16_planes(w0, s0, s1, s2, s3)
        s0, s1, s2, s3 = _scales_beside(lower, w1, E4M3)
        q0, q1, q2, q3 = bf16_planes(w1, s0, s1, s2, s3)
    else:
        p0, p1, p2, p3 = bf16_planes(w0, s0, s0, s1, s1)
        q0, q1, q2, q3 = bf16_planes(w1, s2, s2, s3, s3)
    p = gl.join(gl.join(p0, p2), gl.join(p1, p3))
    q = gl.join(gl.join(q0, q2), gl.join(q1, q3))
    # [warp, row, word half, lane, word, plane bits, row half] to rows and columns
    w = (
        gl.join(p, q)
        .reshape((TILE // 16, 8, 2, 4, 2, 2, 2, 2))
        .permute((0, 7, 1, 5, 6, 2, 3, 4))
        .reshape((TILE, GROUP))
    )
    return gl.convert_layout(w, OPERAND, assert_trivial=True)


@gluon.jit
def _scales_of_tiles(scales, E4M3: gl.constexpr):
    """Scale words of two weight tiles from [2, words]: upper and lower rows of the first, then of the second."""
    SIZE: gl.constexpr = scales.shape[1]
    if E4M3:
        upper, lower = gl.split(scales.reshape((2, SIZE // 16, 2, 8)).permute((0, 1, 3, 2)))
        upper0, upper1 = gl.split(upper.reshape((2, SIZE // 2)).permute((1, 0)))
        lower0, lower1 = gl.split(lower.reshape((2, SIZE // 2)).permute((1, 0)))
    else:
        upper0, upper1 = gl.split(scales.permute((1, 0)))
        lower0, lower1 = upper0, upper1
    return upper0, lower0, upper1, lower1


@gluon.jit
def copy_weights(buffers, i: gl.constexpr, weights, live):
    """Begin to copy the words and scales of one step; zeros unless ``live``."""
    words0, words1, scales = weights
    buffers0, buffers1, scale_buffers = buffers
    copy(buffers0[i], words0, mask=live)
    copy(buffers1[i], words1, mask=live)
    copy(scale_buffers[i], scales, mask=live)


@gluon.jit
def ahead(weights, steps: gl.constexpr, E4M3: gl.constexpr):
    """Pointers to words and scales of a later step."""
    SIZE: gl.constexpr = ROWS if E4M3 else ROWS // 2
    words0, words1, scales = weights
    return words0 + steps * WORDS, words1 + steps * WORDS, scales + steps * SIZE


@gluon.jit
def weight_pointers(words, scales, row_tile, row_tiles, groups, group, E4M3: gl.constexpr):
    """Words [n, 16] of two weight tiles and their scale words [2, n or n/2] in ``group``; the last row tile repeats.

    ``row_tile`` counts tiles of 64 rows.
    """
    WARPS: gl.constexpr = gl.num_warps()
    SIZE: gl.constexpr = ROWS if E4M3 else ROWS // 2
    row = gl.arange(0, 16 * WARPS, gl.SliceLayout(1, _word_copy(WARPS)))
    word = gl.arange(0, PLANE, gl.SliceLayout(0, _word_copy(WARPS)))
    tile = row_tile + row // ROWS
    offset = (group * WORDS + row % ROWS * PLANE)[:, None] + word[None, :]
    words0 = words + (gl.minimum(tile, row_tiles - 1) * groups * WORDS)[:, None] + offset
    words1 = words + (gl.minimum(tile + WARPS // 4, row_tiles - 1) * groups * WORDS)[:, None] + offset
    SCALE_COPY: gl.constexpr = _scale_copy(WARPS)
    which = gl.arange(0, 2, gl.SliceLayout(1, SCALE_COPY))
    word = gl.arange(0, SIZE * WARPS // 4, gl.SliceLayout(0, SCALE_COPY))
    tile = gl.minimum(row_tile + (which * (WARPS // 4))[:, None] + (word // SIZE)[None, :], row_tiles - 1)
    return words0, words1, scales + (tile * groups + group) * SIZE + (word % SIZE)[None, :]


@gluon.jit
def allocate(STAGES: gl.constexpr, BLOCK_M: gl.constexpr, E4M3: gl.constexpr):
    """STAGES buffers of two tiles of words, of their scale words, and of tokens [BLOCK_M, 64]."""
    TILE: gl.constexpr = 16 * gl.num_warps()
    SIZE: gl.constexpr = TILE if E4M3 else TILE // 2
    words0 = ()
    words1 = ()
    scales = ()
    tokens = ()
    for _ in gl.static_range(STAGES):
        words0 += (gl.allocate_shared_memory(gl.int16, [TILE, PLANE], _WORD_SHARED),)
        words1 += (gl.allocate_shared_memory(gl.int16, [TILE, PLANE], _WORD_SHARED),)
        scales += (gl.allocate_shared_memory(gl.int32, [2, SIZE], _SCALE_SHARED),)
        tokens += (gl.allocate_shared_memory(gl.bfloat16, [BLOCK_M, GROUP], _TOKEN_SHARED),)
    return (words0, words1, scales), tokens


@gluon.jit
def token_pointers(tokens, order, rows, top_k, K, column, BLOCK_M: gl.constexpr):
    """Pointers [BLOCK_M, columns] from ``column`` [columns] of the tokens of sorted rows; the last row repeats.

    A sorted row's token is that of ``order``'s pair where there are slots, otherwise the row itself.
    """
    first, end = rows
    row = gl.minimum(first + gl.arange(0, BLOCK_M, gl.SliceLayout(1, token_copy(gl.num_warps()))), end - 1)
    if top_k is not None:
        row = gl.load(order + row) // top_k
    return tokens + row.to(gl.int64)[:, None] * K + column[None, :]


@gluon.jit
def multiply(acc0, acc1, words0, words1, scales, tokens, E4M3: gl.constexpr, MMA: gl.constexpr):
    """Both accumulators plus one step's products; ``acc1`` goes in and comes out with its product under way.

    Registers that a product reads must not be written before it is waited for: each is waited for once the next
    has begun, and their registers take turns.
    """
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    SCALE_LANES: gl.constexpr = _scale_lanes(gl.num_warps(), E4M3)
    WORD_LANES: gl.constexpr = _word_lanes(gl.num_warps())
    upper0, lower0, upper1, lower1 = _scales_of_tiles(scales.load(SCALE_LANES), E4M3)
    x = tokens.permute((1, 0))
    w = _decoded(words0.load(WORD_LANES), upper0, lower0, OPERAND, E4M3)
    acc0 = warpgroup_mma(w, x, acc0, is_async=True)
    acc1 = warpgroup_mma_wait(1, deps=[acc1])
    w = _decoded(words1.load(WORD_LANES), upper1, lower1, OPERAND, E4M3)
    acc1 = warpgroup_mma(w, x, acc1, is_async=True)
    return warpgroup_mma_wait(1, deps=[acc0]), acc1
