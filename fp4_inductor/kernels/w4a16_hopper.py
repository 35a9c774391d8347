"""The two GEMMs of ``w4a16_gemm`` on sm_90, in Gluon.

They read and write what the plain kernels do. What is their own is the pipeline: a program multiplies two weight
tiles (64 x 64, twice as high with two warpgroups) in each step, and decodes one while the tensor cores work on the
other. Words, scales and tokens come to shared memory by asynchronous copies; words go on to registers by
``ldmatrix``, a whole tile in one instruction, and are decoded there in the order in which a matrix instruction wants
them.

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
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .w4a16_hopper_tile import (
    ahead,
    allocate,
    barrier,
    copy,
    copy_weights,
    multiply,
    token_copy,
    token_pointers,
    weight_pointers,
)
from .w4a16_tile import (
    GROUP,
    ROWS,
    activation,
    cast,
    narrowed,
    place_block,
    rows_of_tile,
    scale_and_bias,
    weights_of_expert,
)


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
    """Two tiles of weights [n, K] times tokens [K, BLOCK_M], in float32.

    ``rows``: the first sorted row and the expert's last + 1. WAIT: tokens come from the kernel before.
    """
    TILE: gl.constexpr = 16 * gl.num_warps()
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

    buffers, token_buffers = allocate(STAGES, BLOCK_M, E4M3)
    buffers0, buffers1, scale_buffers = buffers
    row_tile = row_block * (2 * TILE // ROWS)
    weights = weight_pointers(words, scales, row_tile, row_tiles, groups, start, E4M3)
    for i in gl.static_range(STAGES - 1):
        copy_weights(buffers, i, ahead(weights, i, E4M3), i < steps)

    column = gl.arange(0, GROUP, gl.SliceLayout(0, token_copy(gl.num_warps())))
    tokens = token_pointers(tokens, order, rows, top_k, K, start * GROUP + column, BLOCK_M)
    columns = gl.minimum(K - start * GROUP, steps * GROUP)  # from ``tokens`` on; zeros past them
    if WAIT:
        gdc_wait()
    for i in gl.static_range(AHEAD):
        live = (column < columns - i * GROUP)[None, :]
        copy(token_buffers[i], tokens + i * GROUP, mask=live)
    async_copy.commit_group()
    for _ in gl.static_range(YOUNGER):
        async_copy.commit_group()

    acc0 = gl.zeros([TILE, BLOCK_M], gl.float32, MMA)
    acc1 = warpgroup_mma_init(gl.zeros([TILE, BLOCK_M], gl.float32, MMA))
    # There is a step; but where a way seems to lead around the loop, ptxas waits for every product at once.
    turns = gl.maximum(gl.cdiv(steps, STAGES), 1)
    left = steps - (STAGES - 1)
    columns -= AHEAD * GROUP
    tokens += AHEAD * GROUP
    weights = ahead(weights, STAGES - 1, E4M3)
    for _ in range(turns):
        for i in gl.static_range(STAGES):  # steps past the last multiply zeros
            async_copy.wait_group(YOUNGER)
            barrier()
            fence_async_shared()
            live = (column < columns - i * GROUP)[None, :]
            next_tokens = token_buffers[(i + AHEAD) % STAGES]
            copy(next_tokens, tokens + i * GROUP, mask=live)
            async_copy.commit_group()
            copy_weights(buffers, (i + STAGES - 1) % STAGES, ahead(weights, i, E4M3), i < left)
            async_copy.commit_group()
            acc0, acc1 = multiply(acc0, acc1, buffers0[i], buffers1[i], scale_buffers[i], token_buffers[i], E4M3, MMA)
        weights = ahead(weights, STAGES, E4M3)
        tokens += STAGES * GROUP
        columns -= STAGES * GROUP
        left -= STAGES
    acc1 = warpgroup_mma_wait(0, deps=[acc1])
    async_copy.wait_group(0)
    return acc0, acc1


@gluon.jit
def _part(parts, split, which: gl.constexpr, BLOCK_M: gl.constexpr, MMA: gl.constexpr):
    """Pointers [n, BLOCK_M] to one weight tile of one program's part of a block, float32."""
    TILE: gl.constexpr = 16 * gl.num_warps()
    n = gl.arange(0, TILE, gl.SliceLayout(1, MMA))
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, MMA))
    return parts + (split * 2 + which) * (TILE * BLOCK_M) + n[:, None] * BLOCK_M + m[None, :]


@gluon.jit
def _whole_sum(acc0, acc1, shared, split, BLOCK_M: gl.constexpr, SPLIT_K: gl.constexpr, MMA: gl.constexpr):
    """The sums of a block's SPLIT_K parts, and whether this program has them; as in ``w4a16_gemm``."""
    whole = True
    if SPLIT_K > 1:
        parts, arrivals = shared
        gl.store(_part(parts, split, 0, BLOCK_M, MMA), acc0)
        gl.store(_part(parts, split, 1, BLOCK_M, MMA), acc1)
        barrier()
        whole = gl.atomic_add(arrivals, 1, sem="acq_rel") == SPLIT_K - 1
        if whole:
            gl.store(arrivals, 0)  # the next GEMM counts from zero again
            acc0 = gl.zeros_like(acc0)
            acc1 = acc0
            for i in gl.static_range(SPLIT_K):
                acc0 += gl.load(_part(parts, i, 0, BLOCK_M, MMA), cache_modifier=".cg")
                acc1 += gl.load(_part(parts, i, 1, BLOCK_M, MMA), cache_modifier=".cg")
    return acc0, acc1, whole


@gluon.jit
def _write_h(
    acc,
    first_row,
    weights,
    ends,
    h,
    I,  # noqa: E741
    N,
    knobs,
    HAS_BIAS: gl.constexpr,
    GATED: gl.constexpr,
    BOUND: gl.constexpr,
    KIND: gl.constexpr,
    MMA: gl.constexpr,
):
    """Rows of h from a product [n, m] of rows of w13 from ``first_row``."""
    TILE: gl.constexpr = acc.shape[0]
    WARPS: gl.constexpr = gl.num_warps()
    _, _, row_scale, bias = weights
    first, end = ends
    n = gl.minimum(first_row + gl.arange(0, TILE, gl.SliceLayout(1, MMA)), N - 1)
    acc = scale_and_bias(acc, row_scale, bias, n, HAS_BIAS)
    out = activation(acc, knobs, GATED, BOUND, KIND)
    COLUMNS: gl.constexpr = out.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [COLUMNS // 8, 256 // COLUMNS], [1, WARPS], [0, 1])
    out = gl.convert_layout(cast(out, h.dtype.element_ty, False), LAYOUT)
    i = first_row // (2 if GATED else 1) + gl.arange(0, COLUMNS, gl.SliceLayout(1, LAYOUT))
    row = first + gl.arange(0, out.shape[1], gl.SliceLayout(0, LAYOUT))
    gl.store(h + row.to(gl.int64)[None, :] * I + i[:, None], out, mask=(i < I)[:, None] & (row < end)[None, :])


@gluon.jit
def _gate_up_tile(
    BLOCK_M: gl.constexpr,
    hidden,
    weights,
    order,
    h,
    shared,
    place,
    ends,
    sizes,
    knobs,
    STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr,
    E4M3: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    GATED: gl.constexpr,
    BOUND: gl.constexpr,
    KIND: gl.constexpr,
    PDL: gl.constexpr,
):
    """At most BLOCK_M rows of h and two weight tiles' rows of w13; the weights are one expert's."""
    WARPS: gl.constexpr = gl.num_warps()
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    row_block, split = place
    top_k, H, I, N = sizes  # noqa: E741
    acc0, acc1 = _product(
        ends, hidden, order, weights, place, (top_k, H, N // ROWS), BLOCK_M, STAGES, SPLIT_K, E4M3, False, MMA
    )
    if PDL:  # later than it might: programs that wait take the place of others, and crowd on a few multiprocessors
        gdc_launch_dependents()
    acc0, acc1, whole = _whole_sum(acc0, acc1, shared, split, BLOCK_M, SPLIT_K, MMA)
    if whole:
        row = row_block * (2 * 16 * WARPS)
        _write_h(acc0, row, weights, ends, h, I, N, knobs, HAS_BIAS, GATED, BOUND, KIND, MMA)
        row += 16 * WARPS
        if row < N:
            _write_h(acc1, row, weights, ends, h, I, N, knobs, HAS_BIAS, GATED, BOUND, KIND, MMA)


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
    parts,  # scratch where SPLIT_K > 1: float32 [32 num_warps, BLOCK_M] a program
    arrivals,  # int32 zeros, one a block of h
    top_k,
    H,
    I,  # noqa: E741
    alpha,
    beta,
    limit,
    up_limit,
    BLOCK_M: gl.constexpr,
    MIN_M: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr,
    E4M3: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    GATED: gl.constexpr,
    BOUND: gl.constexpr,
    KIND: gl.constexpr,
    PDL: gl.constexpr = False,
):
    """h = act(hidden @ w13) for one token tile and 32 rows of w13 a warp; as ``w4a16_gemm.gate_up_kernel``."""
    BLOCK_N: gl.constexpr = 2 * 16 * gl.num_warps()
    if PDL:
        gdc_wait()
    N = I * 2 if GATED else I
    block = gl.program_id(0) // SPLIT_K
    blocks = gl.cdiv(N, BLOCK_N)
    tiles = gl.load(num_tiles)
    if block >= tiles * blocks:
        return
    tile, row_block = place_block(block, tiles, blocks, GROUP_M)
    expert, first, end = rows_of_tile(tile, tile_expert, tile_row, expert_end)
    weights = weights_of_expert(words, scales, row_scale, bias, expert, N, N, H, E4M3)
    place = (row_block, gl.program_id(0) % SPLIT_K)
    shared = (parts + block.to(gl.int64) * (SPLIT_K * BLOCK_N * BLOCK_M), arrivals + block)
    sizes, knobs = (top_k, H, I, N), (alpha, beta, limit, up_limit)
    narrowed(
        _gate_up_tile,
        end - first,
        BLOCK_M,
        MIN_M,
        (
            hidden,
            weights,
            order,
            h,
            shared,
            place,
            (first, end),
            sizes,
            knobs,
            STAGES,
            SPLIT_K,
            E4M3,
            HAS_BIAS,
            GATED,
            BOUND,
            KIND,
            PDL,
        ),
    )


@gluon.jit
def _write_y(acc, first_row, weights, ends, order, topk_weights, y, H, HAS_BIAS: gl.constexpr, MMA: gl.constexpr):
    """Columns of y from a product [n, m] of rows of w2 from ``first_row``."""
    TILE: gl.constexpr = acc.shape[0]
    BLOCK_M: gl.constexpr = acc.shape[1]
    _, _, row_scale, bias = weights
    first, end = ends
    n = gl.minimum(first_row + gl.arange(0, TILE, gl.SliceLayout(1, MMA)), H - 1)
    acc = scale_and_bias(acc, row_scale, bias, n, HAS_BIAS)
    row = first + gl.arange(0, BLOCK_M, gl.SliceLayout(0, MMA))
    pair = gl.load(order + gl.minimum(row, end - 1))
    acc *= gl.load(topk_weights + pair).to(gl.float32)[None, :]
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [TILE // 8, 256 // TILE], [1, gl.num_warps()], [0, 1])
    out = gl.convert_layout(cast(acc, y.dtype.element_ty, False), LAYOUT)
    n = first_row + gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT))
    row = first + gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT))
    pair = gl.load(order + gl.minimum(row, end - 1))
    gl.store(y + pair.to(gl.int64)[None, :] * H + n[:, None], out, mask=(n < H)[:, None] & (row < end)[None, :])


@gluon.jit
def _down_tile(
    BLOCK_M: gl.constexpr,
    h,
    weights,
    topk_weights,
    order,
    y,
    shared,
    place,
    ends,
    sizes,
    STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr,
    E4M3: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """At most BLOCK_M rows of y and two weight tiles' columns; the weights are one expert's."""
    WARPS: gl.constexpr = gl.num_warps()
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    row_block, split = place
    H, I = sizes  # noqa: E741
    acc0, acc1 = _product(
        ends, h, order, weights, place, (None, I, gl.cdiv(H, ROWS)), BLOCK_M, STAGES, SPLIT_K, E4M3, PDL, MMA
    )
    if PDL:
        gdc_launch_dependents()
    acc0, acc1, whole = _whole_sum(acc0, acc1, shared, split, BLOCK_M, SPLIT_K, MMA)
    if whole:
        row = row_block * (2 * 16 * WARPS)
        _write_y(acc0, row, weights, ends, order, topk_weights, y, H, HAS_BIAS, MMA)
        row += 16 * WARPS
        if row < H:
            _write_y(acc1, row, weights, ends, order, topk_weights, y, H, HAS_BIAS, MMA)


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
    MIN_M: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr,
    E4M3: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr = False,
):
    """y = topk_weight * (h @ w2 + bias) for one token tile and 32 columns a warp; as ``w4a16_gemm.down_kernel``."""
    BLOCK_N: gl.constexpr = 2 * 16 * gl.num_warps()
    block = gl.program_id(0) // SPLIT_K
    blocks = gl.cdiv(H, BLOCK_N)
    tiles = gl.load(num_tiles)  # gate_up waited for the route before this kernel could start
    if block >= tiles * blocks:
        if PDL:
            gdc_wait()
        return
    tile, row_block = place_block(block, tiles, blocks, GROUP_M)
    expert, first, end = rows_of_tile(tile, tile_expert, tile_row, expert_end)
    N = gl.cdiv(H, ROWS) * ROWS
    weights = weights_of_expert(words, scales, row_scale, bias, expert, N, H, I, E4M3)
    place = (row_block, gl.program_id(0) % SPLIT_K)
    shared = (parts + block.to(gl.int64) * (SPLIT_K * BLOCK_N * BLOCK_M), arrivals + block)
    sizes = (H, I)
    narrowed(
        _down_tile,
        end - first,
        BLOCK_M,
        MIN_M,
        (h, weights, topk_weights, order, y, shared, place, (first, end), sizes, STAGES, SPLIT_K, E4M3, HAS_BIAS, PDL),
    )
