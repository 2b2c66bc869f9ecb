"""Kernels for the gradient of the bias: the band of near tiles and its sum for a table, and a dense bias.

dS is recomputed where it is summed: no atomics, no buffer of the scores' size, and the same bits each time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fat5.ops.attention.tile_scores import LOG2E, keep_weights, load_rows, load_stats, mask_scores, sequence_bounds
from fat5.ops.dependent_launch import gdc_launch_dependents


@triton.jit
def band_kernel(
    Q,
    K,
    V,
    DO,
    Stats,
    Bias,
    Parts,
    Tiles,
    CuQ,
    CuK,
    KeyStarts,
    KeyLengths,
    Offsets,
    Seed,
    scale,
    offset,
    threshold,
    keep_scale,
    q_batch,
    q_row,
    q_head,
    k_batch,
    k_row,
    k_head,
    v_batch,
    v_row,
    v_head,
    do_batch,
    do_row,
    do_head,
    H,
    M,
    N,
    num_items,
    blocks_a_sequence,
    first_tile,
    first_near,
    last_near,
    BM: tl.constexpr,
    RATIO: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RADIUS: tl.constexpr,
    CAUSAL: tl.constexpr,
    VARLEN: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: the tiles that lie `tile` tiles right of the diagonal, of a share of all blocks of BM queries.

    All its tiles have the same distances, so dS is summed over tiles in registers and only then along the diagonals.
    The query kernel sums what is far; its tiles are RATIO * BM by BM, so a block of queries takes part where the tile
    of that kernel is near. Parts [shares, H, tiles, 2 BM]: column c of tile t is distance (t - 1) BM + c.
    """
    EVEN_D: tl.constexpr = BLOCK_D == D
    share = tl.program_id(1)
    head = tl.program_id(2)
    head64 = head.to(tl.int64)
    tile = tl.program_id(0) + first_tile
    lanes = tl.arange(0, BM)
    dims = tl.arange(0, BLOCK_D)
    distance = tile * BM + lanes[None, :] - lanes[:, None]
    near = tl.minimum(tl.maximum(distance, -RADIUS), RADIUS)
    bias = tl.load(Bias + head64 * (2 * RADIUS + 1) + RADIUS + near)
    acc = tl.zeros([BM, BM], tl.float32)
    for item in range(share, num_items, tl.num_programs(1)):
        if VARLEN:
            seq = tl.load(Tiles + 2 * item)
            block = tl.load(Tiles + 2 * item + 1)
            unused = seq < 0
            seq = tl.maximum(seq, 0)
            batch64 = tl.zeros([], tl.int64)
        else:
            seq = item // blocks_a_sequence
            block = item % blocks_a_sequence
            unused = False
            batch64 = tl.cast(seq, tl.int64)
        q_first, k_first, num_queries, key_start, key_end, shift = sequence_bounds(
            seq, CuQ, CuK, KeyStarts, KeyLengths, Offsets, offset, M, N, VARLEN, OFFSET, HAS_STARTS, HAS_LENGTHS
        )
        in_query_tile = tile + block % RATIO
        if VARLEN:
            num_queries = tl.where(unused, 0, num_queries)
        takes_part = (in_query_tile >= first_near) & (in_query_tile <= last_near)
        m0 = block * BM
        n0 = m0 + shift + tile * BM
        if EVEN_N:
            # A tile lies inside or outside as a whole. One outside reads some other tile, and its dS is set to 0.
            takes_part = takes_part & (n0 >= 0) & (n0 < N)
            n0 = tl.minimum(tl.maximum(n0, 0), N - BM)
        else:
            key_end = tl.where(takes_part, key_end, 0)
        rows = m0 + lanes
        keys = n0 + lanes
        q_place = batch64 * q_batch + head64 * q_head + (q_first + m0) * q_row
        do_place = batch64 * do_batch + head64 * do_head + (q_first + m0) * do_row
        k_place = batch64 * k_batch + head64 * k_head + (k_first + n0) * k_row
        v_place = batch64 * v_batch + head64 * v_head + (k_first + n0) * v_row
        q = load_rows(
            Q + q_place + lanes[:, None] * q_row + dims[None, :],
            rows[:, None], 0, num_queries, dims[None, :], D, EVEN_M, EVEN_D,
        )  # fmt: skip
        kt = load_rows(
            K + k_place + lanes[None, :] * k_row + dims[:, None],
            keys[None, :], key_start, key_end, dims[:, None], D, EVEN_N, EVEN_D,
        )  # fmt: skip
        do = load_rows(
            DO + do_place + lanes[:, None] * do_row + dims[None, :],
            rows[:, None], 0, num_queries, dims[None, :], D, EVEN_M, EVEN_D,
        )  # fmt: skip
        vt = load_rows(
            V + v_place + lanes[None, :] * v_row + dims[:, None],
            keys[None, :], key_start, key_end, dims[:, None], D, EVEN_N, EVEN_D,
        )  # fmt: skip
        lse, delta = load_stats(Stats + ((batch64 * H + head) * M + q_first) * 2, rows, num_queries, EVEN_M, False)
        if EVEN_N:
            lse = tl.where(takes_part, lse, float("inf"))
        s = tl.dot(q, kt, input_precision=PRECISION) * scale + bias
        s = mask_scores(s, distance, keys[None, :], key_start, key_end, CAUSAL, not EVEN_N)
        p = tl.exp2(s - lse[:, None])
        dp = tl.dot(do, vt, input_precision=PRECISION)
        if DROPOUT:
            keep = keep_weights(
                q_first + batch64 * M + rows[:, None], k_first + batch64 * N + keys[None, :], head, Seed, threshold
            )
            dp = tl.where(keep, dp * keep_scale, 0.0)
        acc += p * (dp - delta[:, None])
    index = lanes[None, :] + lanes[:, None]  # turns row i right by i: column c then holds distance c - BM or c
    wrapped = index >= BM
    skewed = tl.gather(acc, tl.where(wrapped, index - BM, index), 1)
    Parts += ((share * tl.num_programs(2) + head64) * tl.num_programs(0) + tl.program_id(0)) * 2 * BM
    tl.store(Parts + lanes, tl.sum(tl.where(wrapped, skewed, 0.0), 0))
    tl.store(Parts + BM + lanes, tl.sum(tl.where(wrapped, 0.0, skewed), 0))


@triton.jit
def table_kernel(
    Parts,
    Sums,
    DTable,
    num_sums,
    num_tiles,
    first_distance,
    shares,
    BM: tl.constexpr,
    RADIUS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: the table gradient [2R + 1] of one head, from the band's diagonals and the sums of the far tiles.

    Tile t's first BM columns are the distances of tile t - 1's last: a distance is the sum of two entries.
    """
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, WIDTH)
    tile = lanes // BM
    place = lanes % BM
    values = tl.zeros([WIDTH], tl.float32)
    for share in range(0, shares):
        base = Parts + (share * tl.num_programs(0) + head) * num_tiles * 2 * BM
        values += tl.load(base + tile * 2 * BM + place, mask=tile < num_tiles, other=0.0)
        before = (tile > 0) & (tile <= num_tiles)
        values += tl.load(base + (tile - 1) * 2 * BM + BM + place, mask=before, other=0.0)
    distance = lanes + first_distance
    left = tl.sum(tl.where(distance <= -RADIUS, values, 0.0), 0)
    right = tl.sum(tl.where(distance >= RADIUS, values, 0.0), 0)
    entries = tl.arange(0, CHUNK)
    far_left = tl.zeros([CHUNK], tl.float32)
    far_right = tl.zeros([CHUNK], tl.float32)
    for start in range(0, num_sums, CHUNK):
        inside = start + entries < num_sums
        base = Sums + (head * num_sums + start + entries) * 2
        far_left += tl.load(base, mask=inside, other=0.0)
        far_right += tl.load(base + 1, mask=inside, other=0.0)
    DTable += head * (2 * RADIUS + 1) + RADIUS
    tl.store(DTable + distance, values, mask=(distance > -RADIUS) & (distance < RADIUS))
    tl.store(DTable - RADIUS, left + tl.sum(far_left, 0))
    tl.store(DTable + RADIUS, right + tl.sum(far_right, 0))


@triton.jit
def dense_bias_kernel(
    Q,
    K,
    V,
    DO,
    Stats,
    Bias,
    DBias,
    KeyStarts,
    KeyLengths,
    Offsets,
    Seed,
    scale,
    offset,
    threshold,
    keep_scale,
    q_batch,
    q_row,
    q_head,
    k_batch,
    k_row,
    k_head,
    v_batch,
    v_row,
    v_head,
    do_batch,
    do_row,
    do_head,
    bias_batch,
    bias_head,
    bias_row,
    db_batch,
    db_head,
    db_row,
    H,
    M,
    N,
    sum_batches,
    sum_heads,
    sum_blocks,
    BM: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    DROPOUT: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: a tile of the gradient of a dense bias, summed in float32 over the axes that the bias broadcasts.

    Grid: key blocks, query blocks (1 where rows are broadcast), batches * heads of the bias. `sum_batches`, `sum_heads`
    and `sum_blocks` count what a program sums over; an axis that is not broadcast counts 1.
    """
    EVEN_D: tl.constexpr = BLOCK_D == D
    lanes = tl.arange(0, BM)
    cols = tl.arange(0, BN)
    dims = tl.arange(0, BLOCK_D)
    heads_of_bias = H // sum_heads
    own_batch = tl.program_id(2) // heads_of_bias
    own_head = tl.program_id(2) % heads_of_bias
    n0 = tl.program_id(0) * BN
    keys = n0 + cols
    first = tl.program_id(1) * BM + lanes
    Bias += own_batch.to(tl.int64) * bias_batch + own_head.to(tl.int64) * bias_head
    # What a program sums over are the axes that the bias broadcasts, so all its tiles have the same bias.
    bias = LOG2E * tl.load(
        Bias + first[:, None].to(tl.int64) * bias_row + keys[None, :],
        mask=(keys[None, :] < N) & ((first[:, None] < M) | SUM_ROWS),
        other=0.0,
    ).to(tl.float32)
    acc = tl.zeros([BM, BN], tl.float32)
    for item in range(0, sum_batches * sum_heads * sum_blocks):
        block = tl.program_id(1) + item % sum_blocks
        head = own_head + (item // sum_blocks) % sum_heads
        batch = own_batch + item // (sum_blocks * sum_heads)
        batch64 = tl.cast(batch, tl.int64)
        head64 = tl.cast(head, tl.int64)
        q_first, k_first, num_queries, key_start, key_end, shift = sequence_bounds(
            batch, Seed, Seed, KeyStarts, KeyLengths, Offsets, offset, M, N, False, OFFSET, HAS_STARTS, HAS_LENGTHS
        )
        m0 = block * BM
        rows = m0 + lanes
        m64 = tl.cast(m0, tl.int64)
        q = load_rows(
            Q + batch64 * q_batch + head64 * q_head + m64 * q_row + lanes[:, None] * q_row + dims[None, :],
            rows[:, None], 0, M, dims[None, :], D, EVEN_M, EVEN_D,
        )  # fmt: skip
        do = load_rows(
            DO + batch64 * do_batch + head64 * do_head + m64 * do_row + lanes[:, None] * do_row + dims[None, :],
            rows[:, None], 0, M, dims[None, :], D, EVEN_M, EVEN_D,
        )  # fmt: skip
        kt = load_rows(
            K + batch64 * k_batch + head64 * k_head + keys[None, :].to(tl.int64) * k_row + dims[:, None],
            keys[None, :], key_start, key_end, dims[:, None], D, EVEN_N, EVEN_D,
        )  # fmt: skip
        vt = load_rows(
            V + batch64 * v_batch + head64 * v_head + keys[None, :].to(tl.int64) * v_row + dims[:, None],
            keys[None, :], key_start, key_end, dims[:, None], D, EVEN_N, EVEN_D,
        )  # fmt: skip
        lse, delta = load_stats(Stats + (batch64 * H + head) * M * 2, rows, M, EVEN_M, False)
        s = tl.dot(q, kt, input_precision=PRECISION) * scale + bias
        distance = keys[None, :] - (m0 + shift + lanes[:, None])
        s = mask_scores(s, distance, keys[None, :], key_start, key_end, CAUSAL, not EVEN_N)
        p = tl.exp2(s - lse[:, None])
        dp = tl.dot(do, vt, input_precision=PRECISION)
        if DROPOUT:
            keep = keep_weights(batch64 * M + rows[:, None], batch64 * N + keys[None, :], head, Seed, threshold)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        acc += p * (dp - delta[:, None])
    DBias += own_batch.to(tl.int64) * db_batch + own_head.to(tl.int64) * db_head
    if SUM_ROWS:
        tl.store(DBias + keys, tl.sum(acc, 0).to(DBias.dtype.element_ty), mask=keys < N)
    else:
        rows = tl.program_id(1) * BM + lanes
        out = DBias + rows[:, None].to(tl.int64) * db_row + keys[None, :]
        tl.store(out, acc.to(DBias.dtype.element_ty), mask=(rows[:, None] < M) & (keys[None, :] < N))
