"""The two GEMMs of ``w4a16_gemm`` for a few tokens an expert on sm_90, in Gluon: weights bound by memory.

They read and write what the plain kernels do. What is their own is the pipeline: a program multiplies two weight
tiles (64 x 64) of two row tiles in each step, and decodes one while the tensor cores work on the other. Words,
scales and tokens come to shared memory by asynchronous copies; words go on to registers by ``ldmatrix``, a whole
tile in one instruction, and are decoded there in the order in which a matrix instruction wants them.

Shapes as in ``w4a16_gemm``.
"""

# Triton reads these functions itself; they hold no Python types.
# mypy: ignore-errors
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .w4a16_tile import (
    GROUP,
    PLANE,
    ROWS,
    activation,
    bf16_planes,
    cast,
    rows_of_tile,
    scale_and_bias,
    weights_of_expert,
)

# Names after Triton 3.6, and those of 3.6.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

_WORDS = gl.constexpr(ROWS * PLANE)
"""Words of a weight tile."""
_TILES = gl.constexpr(2)
"""Row tiles of a program."""

_WORD_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0]))
_WORD_SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 4, 2, [1, 0]))
"""Rows of 32 bytes; eight of them, 16 bytes each, lie in different banks."""
_WORD_LANES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [8, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )
)
"""What four 8 x 8 matrices of ``ldmatrix`` give a thread: pairs of words, so columns, of a row and the one 8 below."""

_SCALE_COPY = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [2, 2], [1, 0]))
_SCALE_SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))
_SCALE_LANES = gl.constexpr([[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]])
_E8M0_LANES = gl.constexpr(gl.DistributedLinearLayout([[1, 0]], _SCALE_LANES.value, [[0, 8], [0, 16]], [], [2, 32]))
_E4M3_LANES = gl.constexpr(
    gl.DistributedLinearLayout([[1, 0], [0, 8]], _SCALE_LANES.value, [[0, 16], [0, 32]], [], [2, 64])
)
"""Scale words [row tile, word] of the rows that a thread holds words of."""

_TOKEN_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_TOKEN_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


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
def _scale_lanes(scales, words, E4M3: gl.constexpr):
    """The four bytes of scale words [32] as bfloat16 scales beside ``words``, in both halves of int32 [32, 1]."""
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
    """bf16 [64, 64] of a weight tile's words [64, 16] and the scale words [32] of its rows 0..7 and 8..15 mod 16.

    Where they share a word, ``lower`` is not read. Only names of registers move.
    """
    w0, w1 = gl.split(words.reshape((4, 2, 8, PLANE)).permute((0, 2, 3, 1)))
    w0 = w0.reshape((32, PLANE))
    w1 = w1.reshape((32, PLANE))
    s0, s1, s2, s3 = _scale_lanes(upper, w0, E4M3)
    if E4M3:
        p0, p1, p2, p3 = bf16_planes(w0, s0, s1, s2, s3)
        s0, s1, s2, s3 = _scale_lanes(lower, w1, E4M3)
        q0, q1, q2, q3 = bf16_planes(w1, s0, s1, s2, s3)
    else:
        p0, p1, p2, p3 = bf16_planes(w0, s0, s0, s1, s1)
        q0, q1, q2, q3 = bf16_planes(w1, s2, s2, s3, s3)
    p = gl.join(gl.join(p0, p2), gl.join(p1, p3))
    q = gl.join(gl.join(q0, q2), gl.join(q1, q3))
    # [warp, row, word half, lane, word, plane bits, row half] to rows and columns
    w = gl.join(p, q).reshape((4, 8, 2, 4, 2, 2, 2, 2)).permute((0, 7, 1, 5, 6, 2, 3, 4)).reshape((ROWS, GROUP))
    return gl.convert_layout(w, OPERAND, assert_trivial=True)


@gluon.jit
def _scales_of_tiles(scales, E4M3: gl.constexpr):
    """Scale words [32] of two row tiles from [2, words]: upper and lower rows of the first, then of the second."""
    if E4M3:
        upper, lower = gl.split(scales.reshape((2, 4, 2, 8)).permute((0, 1, 3, 2)))
        upper0, upper1 = gl.split(upper.reshape((2, 32)).permute((1, 0)))
        lower0, lower1 = gl.split(lower.reshape((2, 32)).permute((1, 0)))
    else:
        upper0, upper1 = gl.split(scales.permute((1, 0)))
        lower0, lower1 = upper0, upper1
    return upper0, lower0, upper1, lower1


@gluon.jit
def _copy_weights(buffers, i: gl.constexpr, weights, live):
    """Begin to copy the words and scales of one step; zeros unless ``live``."""
    words0, words1, scales = weights
    buffers0, buffers1, scale_buffers = buffers
    _copy(buffers0[i], words0, mask=live)
    _copy(buffers1[i], words1, mask=live)
    _copy(scale_buffers[i], scales, mask=live)


@gluon.jit
def _ahead(weights, steps: gl.constexpr, E4M3: gl.constexpr):
    """Pointers to words and scales of a later step."""
    SIZE: gl.constexpr = ROWS if E4M3 else ROWS // 2
    words0, words1, scales = weights
    return words0 + steps * _WORDS, words1 + steps * _WORDS, scales + steps * SIZE


@gluon.jit
def _weight_pointers(words, scales, row_tile, row_tiles, groups, group, E4M3: gl.constexpr):
    """Words [64, 16] of two row tiles and their scale words [2, 32 or 64] in ``group``; the last row tile repeats."""
    SIZE: gl.constexpr = ROWS if E4M3 else ROWS // 2
    row = gl.arange(0, ROWS, gl.SliceLayout(1, _WORD_COPY))
    word = gl.arange(0, PLANE, gl.SliceLayout(0, _WORD_COPY))
    offset = group * _WORDS + row[:, None] * PLANE + word[None, :]
    next_tile = gl.minimum(row_tile + 1, row_tiles - 1)
    words0 = words + row_tile * groups * _WORDS + offset
    words1 = words + next_tile * groups * _WORDS + offset
    tile = gl.minimum(row_tile + gl.arange(0, _TILES, gl.SliceLayout(1, _SCALE_COPY)), row_tiles - 1)
    word = gl.arange(0, SIZE, gl.SliceLayout(0, _SCALE_COPY))
    return words0, words1, scales + (tile * groups * SIZE)[:, None] + (group * SIZE + word)[None, :]


@gluon.jit
def _buffers(STAGES: gl.constexpr, BLOCK_M: gl.constexpr, E4M3: gl.constexpr):
    """STAGES buffers of two tiles of words, of their scale words, and of tokens [BLOCK_M, 64]."""
    SIZE: gl.constexpr = ROWS if E4M3 else ROWS // 2
    words0 = ()
    words1 = ()
    scales = ()
    tokens = ()
    for _ in gl.static_range(STAGES):
        words0 += (gl.allocate_shared_memory(gl.int16, [ROWS, PLANE], _WORD_SHARED),)
        words1 += (gl.allocate_shared_memory(gl.int16, [ROWS, PLANE], _WORD_SHARED),)
        scales += (gl.allocate_shared_memory(gl.int32, [_TILES, SIZE], _SCALE_SHARED),)
        tokens += (gl.allocate_shared_memory(gl.bfloat16, [BLOCK_M, GROUP], _TOKEN_SHARED),)
    return (words0, words1, scales), tokens


@gluon.jit
def _token_pointers(tokens, order, rows, top_k, K, column, BLOCK_M: gl.constexpr):
    """Pointers [BLOCK_M, columns] from ``column`` [columns] of the tokens of sorted rows; the last row repeats.

    A sorted row's token is that of ``order``'s pair where there are slots, otherwise the row itself.
    """
    first, end = rows
    row = gl.minimum(first + gl.arange(0, BLOCK_M, gl.SliceLayout(1, _TOKEN_COPY)), end - 1)
    if top_k is not None:
        row = gl.load(order + row) // top_k
    return tokens + row.to(gl.int64)[:, None] * K + column[None, :]


@gluon.jit
def _multiply(acc0, acc1, words0, words1, scales, tokens, E4M3: gl.constexpr, MMA: gl.constexpr):
    """Both accumulators plus one step's products; ``acc1`` goes in and comes out with its product under way.

    Registers that a product reads must not be written before it is waited for: each is waited for once the next
    has begun, and their registers take turns.
    """
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    upper0, lower0, upper1, lower1 = _scales_of_tiles(scales.load(_E4M3_LANES if E4M3 else _E8M0_LANES), E4M3)
    x = tokens.permute((1, 0))
    w = _decoded(words0.load(_WORD_LANES), upper0, lower0, OPERAND, E4M3)
    acc0 = warpgroup_mma(w, x, acc0, is_async=True)
    acc1 = warpgroup_mma_wait(1, deps=[acc1])
    w = _decoded(words1.load(_WORD_LANES), upper1, lower1, OPERAND, E4M3)
    acc1 = warpgroup_mma(w, x, acc1, is_async=True)
    return warpgroup_mma_wait(1, deps=[acc0]), acc1


@gluon.jit
def _product(
    rows,
    tokens,
    order,
    weights,
    place,
    sizes,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr,
    E4M3: gl.constexpr,
    WAIT: gl.constexpr,
    MMA: gl.constexpr,
):
    """Two row tiles of weights [64, K] times tokens [K, BLOCK_M], in float32.

    ``rows``: the first sorted row and the expert's last + 1. WAIT: tokens come from the kernel before.
    """
    words, scales, _, _ = weights
    row_block, split = place
    top_k, K, row_tiles = sizes
    # Two groups of copies a step: tokens, two steps fewer ahead than there are buffers, as their last reader may
    # still be under way, then weights, one fewer.
    AHEAD: gl.constexpr = STAGES - 2
    YOUNGER: gl.constexpr = 2 * STAGES - 5
    groups = gl.cdiv(K, GROUP)
    span = gl.cdiv(groups, SPLIT_K)
    start = split * span
    steps = gl.minimum(groups - start, span)

    buffers, token_buffers = _buffers(STAGES, BLOCK_M, E4M3)
    buffers0, buffers1, scale_buffers = buffers
    weights = _weight_pointers(words, scales, row_block * _TILES, row_tiles, groups, start, E4M3)
    for i in gl.static_range(STAGES - 1):
        _copy_weights(buffers, i, _ahead(weights, i, E4M3), i < steps)

    column = gl.arange(0, GROUP, gl.SliceLayout(0, _TOKEN_COPY))
    tokens = _token_pointers(tokens, order, rows, top_k, K, start * GROUP + column, BLOCK_M)
    columns = gl.minimum(K - start * GROUP, steps * GROUP)  # from ``tokens`` on; zeros past them
    if WAIT:
        gdc_wait()
    for i in gl.static_range(AHEAD):
        live = (column < columns - i * GROUP)[None, :]
        _copy(token_buffers[i], tokens + i * GROUP, mask=live)
    async_copy.commit_group()
    for _ in gl.static_range(YOUNGER):
        async_copy.commit_group()

    acc0 = gl.zeros([ROWS, BLOCK_M], gl.float32, MMA)
    acc1 = warpgroup_mma_init(gl.zeros([ROWS, BLOCK_M], gl.float32, MMA))
    # There is a step; but where a way seems to lead around the loop, ptxas waits for every product at once.
    turns = gl.maximum(gl.cdiv(steps, STAGES), 1)
    left = steps - (STAGES - 1)
    columns -= AHEAD * GROUP
    tokens += AHEAD * GROUP
    weights = _ahead(weights, STAGES - 1, E4M3)
    for _ in range(turns):
        for i in gl.static_range(STAGES):  # steps past the last multiply zeros
            async_copy.wait_group(YOUNGER)
            _barrier()
            fence_async_shared()
            live = (column < columns - i * GROUP)[None, :]
            next_tokens = token_buffers[(i + AHEAD) % STAGES]
            _copy(next_tokens, tokens + i * GROUP, mask=live)
            async_copy.commit_group()
            _copy_weights(buffers, (i + STAGES - 1) % STAGES, _ahead(weights, i, E4M3), i < left)
            async_copy.commit_group()
            acc0, acc1 = _multiply(acc0, acc1, buffers0[i], buffers1[i], scale_buffers[i], token_buffers[i], E4M3, MMA)
        weights = _ahead(weights, STAGES, E4M3)
        tokens += STAGES * GROUP
        columns -= STAGES * GROUP
        left -= STAGES
    acc1 = warpgroup_mma_wait(0, deps=[acc1])
    async_copy.wait_group(0)
    return acc0, acc1


@gluon.jit
def _part(parts, split, which: gl.constexpr, BLOCK_M: gl.constexpr, MMA: gl.constexpr):
    """Pointers [64, BLOCK_M] to one row tile of one program's part of a block, float32."""
    n = gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, MMA))
    return parts + (split * _TILES + which) * (ROWS * BLOCK_M) + n[:, None] * BLOCK_M + m[None, :]


@gluon.jit
def _whole_sum(acc0, acc1, shared, split, BLOCK_M: gl.constexpr, SPLIT_K: gl.constexpr, MMA: gl.constexpr):
    """The sums of a block's SPLIT_K parts, and whether this program has them; as in ``w4a16_gemm``."""
    whole = True
    if SPLIT_K > 1:
        parts, arrivals = shared
        gl.store(_part(parts, split, 0, BLOCK_M, MMA), acc0)
        gl.store(_part(parts, split, 1, BLOCK_M, MMA), acc1)
        _barrier()
        whole = gl.atomic_add(arrivals, 1, sem="acq_rel") == SPLIT_K - 1
        if whole:
            gl.store(arrivals, 0)  # the next GEMM counts from zero again
            acc0 = gl.zeros([ROWS, BLOCK_M], gl.float32, MMA)
            acc1 = acc0
            for i in gl.static_range(SPLIT_K):
                acc0 += gl.load(_part(parts, i, 0, BLOCK_M, MMA), cache_modifier=".cg")
                acc1 += gl.load(_part(parts, i, 1, BLOCK_M, MMA), cache_modifier=".cg")
    return acc0, acc1, whole


@gluon.jit
def _write_h(
    acc,
    row_tile,
    weights,
    ends,
    h,
    I,  # noqa: E741
    N,
    knobs,
    BLOCK_M: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    GATED: gl.constexpr,
    BOUND: gl.constexpr,
    KIND: gl.constexpr,
    MMA: gl.constexpr,
):
    """Rows of h from a row tile of the product of gate and up."""
    _, _, row_scale, bias = weights
    first, end = ends
    n = gl.minimum(row_tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, MMA)), N - 1)
    acc = scale_and_bias(acc, row_scale, bias, n, HAS_BIAS)
    out = activation(acc, knobs, GATED, BOUND, KIND)
    COLUMNS: gl.constexpr = out.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [COLUMNS // 8, 32 // (COLUMNS // 8)], [1, 4], [0, 1])
    out = gl.convert_layout(cast(out, h.dtype.element_ty, False), LAYOUT)
    i = row_tile * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, LAYOUT))
    row = first + gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT))
    gl.store(h + row.to(gl.int64)[None, :] * I + i[:, None], out, mask=(i < I)[:, None] & (row < end)[None, :])


@gluon.jit
def gate_up_hopper_kernel(
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
    parts,  # scratch where SPLIT_K > 1: float32 [128, BLOCK_M] a program
    arrivals,  # int32 zeros, one a block of h
    top_k,
    H,
    I,  # noqa: E741
    alpha,
    beta,
    limit,
    up_limit,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr,
    E4M3: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    GATED: gl.constexpr,
    BOUND: gl.constexpr,
    KIND: gl.constexpr,
    PDL: gl.constexpr = False,
):
    """h = act(hidden @ w13) for one token tile and 128 rows of w13; as ``w4a16_gemm.gate_up_kernel``."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    if PDL:
        gdc_wait()
    N = I * 2 if GATED else I
    block = gl.program_id(0) // SPLIT_K
    blocks = gl.cdiv(N, ROWS * _TILES)
    if block // blocks >= gl.load(num_tiles):
        return
    expert, first, end = rows_of_tile(block // blocks, tile_expert, tile_row, expert_end)
    ends = (first, end)
    row_block, split = block % blocks, gl.program_id(0) % SPLIT_K
    row_tiles = N // ROWS
    weights = weights_of_expert(words, scales, row_scale, bias, expert, N, N, H, E4M3)
    place, sizes = (row_block, split), (top_k, H, row_tiles)
    acc0, acc1 = _product(ends, hidden, order, weights, place, sizes, BLOCK_M, STAGES, SPLIT_K, E4M3, False, MMA)
    if PDL:  # later than it might: programs that wait take the place of others, and crowd on a few multiprocessors
        gdc_launch_dependents()
    shared = (parts + block.to(gl.int64) * (SPLIT_K * _TILES * ROWS * BLOCK_M), arrivals + block)
    acc0, acc1, whole = _whole_sum(acc0, acc1, shared, split, BLOCK_M, SPLIT_K, MMA)
    if whole:
        row_tile, knobs = row_block * _TILES, (alpha, beta, limit, up_limit)
        _write_h(acc0, row_tile, weights, ends, h, I, N, knobs, BLOCK_M, HAS_BIAS, GATED, BOUND, KIND, MMA)
        if row_tile + 1 < row_tiles:
            _write_h(acc1, row_tile + 1, weights, ends, h, I, N, knobs, BLOCK_M, HAS_BIAS, GATED, BOUND, KIND, MMA)


@gluon.jit
def _write_y(
    acc,
    row_tile,
    weights,
    ends,
    order,
    topk_weights,
    y,
    H,
    BLOCK_M: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    MMA: gl.constexpr,
):
    """Columns of y from a row tile of the product of the down projection."""
    _, _, row_scale, bias = weights
    first, end = ends
    n = gl.minimum(row_tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, MMA)), H - 1)
    acc = scale_and_bias(acc, row_scale, bias, n, HAS_BIAS)
    row = first + gl.arange(0, BLOCK_M, gl.SliceLayout(0, MMA))
    pair = gl.load(order + gl.minimum(row, end - 1))
    acc *= gl.load(topk_weights + pair).to(gl.float32)[None, :]
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    out = gl.convert_layout(cast(acc, y.dtype.element_ty, False), LAYOUT)
    n = row_tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    row = first + gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT))
    pair = gl.load(order + gl.minimum(row, end - 1))
    gl.store(y + pair.to(gl.int64)[None, :] * H + n[:, None], out, mask=(n < H)[:, None] & (row < end)[None, :])


@gluon.jit
def down_hopper_kernel(
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
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr,
    E4M3: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr = False,
):
    """y = topk_weight * (h @ w2 + bias) for one token tile and 128 columns; as ``w4a16_gemm.down_kernel``."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    block = gl.program_id(0) // SPLIT_K
    blocks = gl.cdiv(H, ROWS * _TILES)
    if block // blocks >= gl.load(num_tiles):  # gate_up waited for the route before this kernel could start
        if PDL:
            gdc_wait()
        return
    expert, first, end = rows_of_tile(block // blocks, tile_expert, tile_row, expert_end)
    ends = (first, end)
    row_block, split = block % blocks, gl.program_id(0) % SPLIT_K
    row_tiles = gl.cdiv(H, ROWS)
    weights = weights_of_expert(words, scales, row_scale, bias, expert, row_tiles * ROWS, H, I, E4M3)
    place, sizes = (row_block, split), (None, I, row_tiles)
    acc0, acc1 = _product(ends, h, order, weights, place, sizes, BLOCK_M, STAGES, SPLIT_K, E4M3, PDL, MMA)
    if PDL:
        gdc_launch_dependents()
    shared = (parts + block.to(gl.int64) * (SPLIT_K * _TILES * ROWS * BLOCK_M), arrivals + block)
    acc0, acc1, whole = _whole_sum(acc0, acc1, shared, split, BLOCK_M, SPLIT_K, MMA)
    if whole:
        row_tile = row_block * _TILES
        _write_y(acc0, row_tile, weights, ends, order, topk_weights, y, H, BLOCK_M, HAS_BIAS, MMA)
        if row_tile + 1 < row_tiles:
            _write_y(acc1, row_tile + 1, weights, ends, order, topk_weights, y, H, BLOCK_M, HAS_BIAS, MMA)
