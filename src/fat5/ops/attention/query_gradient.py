"""The kernel for the gradient of queries, which also sums what it sees of the bias's gradient.

Exponents are of 2, as in `backward.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fat5.ops.attention.tile_scores import (
    AFTER,
    ALIBI,
    ALIBI_SIGNED,
    DENSE,
    DISTANCE,
    LOG2E,
    alibi_distance,
    first_aligned,
    keep_weights,
    load_bias,
    load_rows,
    load_stats,
    mask_scores,
    sequence_bounds,
    settled,
    table_bias,
    tile_is_near,
    tile_is_special,
)


@triton.jit
def query_kernel(
    Q,
    K,
    V,
    DO,
    DQ,
    DBias,
    Stats,
    Bias,
    Sums,
    Tiles,
    CuQ,
    CuK,
    KeyStarts,
    KeyLengths,
    Offsets,
    Seed,
    scale,
    softmax_scale,
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
    dq_batch,
    dq_row,
    dq_head,
    bias_batch,
    bias_head,
    bias_row,
    db_batch,
    db_head,
    db_row,
    H,
    M,
    N,
    BM: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BIAS: tl.constexpr,
    RADIUS: tl.constexpr,
    CAUSAL: tl.constexpr,
    VARLEN: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    DROPOUT: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    STORE_BIAS_GRAD: tl.constexpr,
    ASM: tl.constexpr,
    PAIRED: tl.constexpr,
    BIAS_PLACE: tl.constexpr,
    SETTLE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: the gradient of BM queries of one head, over all keys.

    With BIAS_GRAD it also sums dS: over its far tiles, left and right, for a table by distance; times the distance for
    ALiBi. `Sums` is [H, programs a head, 2]. With STORE_BIAS_GRAD dS itself is the gradient of a dense bias that
    broadcasts nothing. Key tiles lie on the grid of the distances, so that the band kernel, which
    sums what is near, sees the same tiles.
    """
    EVEN_D: tl.constexpr = BLOCK_D == D
    dims = tl.arange(0, BLOCK_D)
    lanes = tl.arange(0, BM)
    if VARLEN:
        seq = tl.load(Tiles + 2 * tl.program_id(0))
        block = tl.load(Tiles + 2 * tl.program_id(0) + 1)
        head = tl.program_id(1)
        batch = 0
        slot = tl.program_id(0)
        slots = tl.num_programs(0)
    else:
        block = tl.program_id(0)
        if CAUSAL:
            block = tl.num_programs(0) - 1 - block  # the longest rows first
        seq = tl.program_id(1) // H
        head = tl.program_id(1) % H
        batch = seq
        slot = seq * tl.num_programs(0) + block
        slots = tl.num_programs(0) * (tl.num_programs(1) // H)
    if BIAS_GRAD:
        Sums += (head.to(tl.int64) * slots + slot) * 2
    if VARLEN:
        if seq < 0:  # rows that belong to no document; `block` is the first
            rows = block + lanes
            place = DQ + head.to(tl.int64) * dq_head + rows[:, None].to(tl.int64) * dq_row + dims[None, :]
            inside = (rows[:, None] < M) & (dims[None, :] < D)
            tl.store(place, tl.zeros([BM, BLOCK_D], DQ.dtype.element_ty), mask=inside)
            if BIAS_GRAD:
                tl.store(Sums, 0.0)
                tl.store(Sums + 1, 0.0)
            return
    q_first, k_first, num_queries, key_start, key_end, shift = sequence_bounds(
        seq, CuQ, CuK, KeyStarts, KeyLengths, Offsets, offset, M, N, VARLEN, OFFSET, HAS_STARTS, HAS_LENGTHS
    )
    head64 = head.to(tl.int64)
    batch64 = tl.cast(batch, tl.int64)
    m0 = block * BM
    rows = m0 + lanes
    cols = tl.arange(0, BN)
    position = m0 + shift

    Q += batch64 * q_batch + head64 * q_head + (q_first + m0) * q_row
    DO += batch64 * do_batch + head64 * do_head + (q_first + m0) * do_row
    K += batch64 * k_batch + head64 * k_head + k_first * k_row
    V += batch64 * v_batch + head64 * v_head + k_first * v_row
    q = load_rows(
        Q + lanes[:, None] * q_row + dims[None, :], rows[:, None], 0, num_queries, dims[None, :], D, EVEN_M, EVEN_D
    )
    do = load_rows(
        DO + lanes[:, None] * do_row + dims[None, :], rows[:, None], 0, num_queries, dims[None, :], D, EVEN_M, EVEN_D
    )
    lse, delta = load_stats(Stats + ((batch64 * H + head) * M + q_first) * 2, rows, num_queries, EVEN_M, False)
    left = 0.0
    right = 0.0
    slope = 0.0
    if BIAS == DISTANCE:
        Bias += head64 * (2 * RADIUS + 1) + RADIUS
        left = tl.load(Bias - RADIUS)
        right = tl.load(Bias + RADIUS)
    elif BIAS == ALIBI or BIAS == ALIBI_SIGNED:
        slope = tl.load(Bias + head)
    elif BIAS == DENSE:
        Bias += batch64 * bias_batch + head64 * bias_head + tl.cast(m0, tl.int64) * bias_row

    dq = tl.zeros([BM, BLOCK_D], tl.float32)
    sum_left = tl.zeros([BM], tl.float32)
    sum_right = tl.zeros([BM], tl.float32)
    last = key_end
    if CAUSAL:
        last = tl.minimum(last, position + BM)
    for n0 in range(first_aligned(key_start, shift if not EVEN_N else 0, BN), last, BN):
        n64 = tl.cast(n0, tl.int64)
        keys = n0 + cols
        kt = load_rows(
            K + n64 * k_row + cols[None, :] * k_row + dims[:, None],
            keys[None, :],
            key_start,
            key_end,
            dims[:, None],
            D,
            EVEN_N,
            EVEN_D,
        )  # [BLOCK_D, BN]
        vt = load_rows(
            V + n64 * v_row + cols[None, :] * v_row + dims[:, None],
            keys[None, :],
            key_start,
            key_end,
            dims[:, None],
            D,
            EVEN_N,
            EVEN_D,
        )  # [BLOCK_D, BN]
        if BIAS == DENSE:
            in_bias = None
            if not (EVEN_M and EVEN_N) or BIAS_PLACE == AFTER:
                in_bias = (keys[None, :] >= 0) & (keys[None, :] < N) & (rows[:, None] < M)
            bias_tile = Bias + lanes[:, None] * bias_row + keys[None, :]
            bias = load_bias(bias_tile, in_bias, ASM and STORE_BIAS_GRAD, PAIRED)
        s = tl.dot(q, kt, input_precision=PRECISION)
        distance = keys[None, :] - (position + lanes[:, None])
        factor = scale
        constant = 0.0
        if BIAS == ALIBI or BIAS == ALIBI_SIGNED:
            s = s * scale + slope * alibi_distance(distance, BIAS)
            factor = 1.0
        elif BIAS == DENSE:
            s = s * scale + LOG2E * bias
            factor = 1.0
        if tile_is_special(position, n0, key_start, key_end, BM, BN, BIAS, RADIUS, CAUSAL, not EVEN_N):
            if BIAS == DISTANCE:
                s = s * scale + table_bias(distance, Bias, RADIUS, ASM)
                factor = 1.0
            s = mask_scores(s, distance, keys[None, :], key_start, key_end, CAUSAL, not EVEN_N)
        elif BIAS == DISTANCE:
            constant = tl.where(n0 < position, left, right)
        p = tl.exp2(s * factor - (lse - constant)[:, None])
        dp = tl.dot(do, vt, input_precision=PRECISION)
        if DROPOUT:
            keep = keep_weights(
                q_first + batch64 * M + rows[:, None], k_first + batch64 * N + keys[None, :], head, Seed, threshold
            )
            dp = tl.where(keep, dp * keep_scale, 0.0)
        ds = p * (dp - delta[:, None])
        if BIAS_GRAD:
            if BIAS == DISTANCE:
                near = tile_is_near(position, n0, BM, BN, RADIUS)
                row_sums = tl.sum(ds, 1)
                sum_left += tl.where(near | (n0 >= position), 0.0, row_sums)
                sum_right += tl.where(near | (n0 < position), 0.0, row_sums)
            else:
                sum_left += tl.sum(ds * alibi_distance(distance, BIAS), 1)
        dq = tl.dot(ds.to(kt.dtype), tl.trans(kt), dq, input_precision=PRECISION)
        if SETTLE and ASM:
            dq = settled(dq)
        if STORE_BIAS_GRAD:
            bias_grad = DBias + batch64 * db_batch + head64 * db_head + tl.cast(m0, tl.int64) * db_row
            tl.store(bias_grad + lanes[:, None] * db_row + keys[None, :], ds.to(DBias.dtype.element_ty), mask=in_bias)

    out = DQ + batch64 * dq_batch + head64 * dq_head + (q_first + m0) * dq_row + lanes[:, None] * dq_row + dims[None, :]
    inside = (rows[:, None] < num_queries) & (dims[None, :] < D)
    tl.store(out, (dq * softmax_scale).to(DQ.dtype.element_ty), mask=inside)
    if BIAS_GRAD:
        tl.store(Sums, tl.sum(sum_left, 0))
        tl.store(Sums + 1, tl.sum(sum_right, 0))
