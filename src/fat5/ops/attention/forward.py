"""The forward kernel."""

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
    mask_scores,
    sequence_bounds,
    settled,
    table_bias,
    tile_is_special,
)
from fat5.ops.dependent_launch import gdc_wait


@triton.jit
def forward_kernel(
    Q,
    K,
    V,
    O,  # noqa: E741
    LSE,
    Bias,
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
    o_batch,
    o_row,
    o_head,
    bias_batch,
    bias_head,
    bias_row,
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
    ASM: tl.constexpr,
    BIAS_PLACE: tl.constexpr,
    SETTLE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BM queries of one head of one sequence, over all its keys.

    Exponents are of 2: a score is multiplied by log2(e) where it is exponentiated, and LSE is a log2.
    """
    EVEN_D: tl.constexpr = BLOCK_D == D
    if PDL:  # before any load: what came before may have made q, k and v as well as the table
        gdc_wait()
    dims = tl.arange(0, BLOCK_D)
    lanes = tl.arange(0, BM)
    if VARLEN:
        seq = tl.load(Tiles + 2 * tl.program_id(0))
        block = tl.load(Tiles + 2 * tl.program_id(0) + 1)
        head = tl.program_id(1)
        batch = 0
        if seq < 0:  # rows that belong to no document; `block` is the first
            rows = block + lanes
            out = O + head.to(tl.int64) * o_head + rows[:, None].to(tl.int64) * o_row + dims[None, :]
            tl.store(out, tl.zeros([BM, BLOCK_D], O.dtype.element_ty), mask=(rows[:, None] < M) & (dims[None, :] < D))
            tl.store(LSE + head.to(tl.int64) * M + rows, tl.full([BM], float("inf"), tl.float32), mask=rows < M)
            return
    else:
        block = tl.program_id(0)
        if CAUSAL:
            block = tl.num_programs(0) - 1 - block  # the longest rows first
        seq = tl.program_id(1) // H
        head = tl.program_id(1) % H
        batch = seq
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
    K += batch64 * k_batch + head64 * k_head + k_first * k_row
    V += batch64 * v_batch + head64 * v_head + k_first * v_row
    q = load_rows(
        Q + lanes[:, None] * q_row + dims[None, :], rows[:, None], 0, num_queries, dims[None, :], D, EVEN_M, EVEN_D
    )
    left = 0.0
    right = 0.0
    slope = 0.0
    if BIAS == DISTANCE:
        Bias += head64 * (2 * RADIUS + 1) + RADIUS
        left = tl.load(Bias - RADIUS) * LOG2E
        right = tl.load(Bias + RADIUS) * LOG2E
    elif BIAS == ALIBI or BIAS == ALIBI_SIGNED:
        slope = tl.load(Bias + head)
    elif BIAS == DENSE:
        Bias += batch64 * bias_batch + head64 * bias_head + tl.cast(m0, tl.int64) * bias_row

    acc = tl.zeros([BM, BLOCK_D], tl.float32)
    peak = tl.full([BM], -1e30, tl.float32)  # finite: a row of hidden keys alone then sums to 0, without NaN
    total = tl.zeros([BM], tl.float32)
    last = key_end
    if CAUSAL:
        last = tl.minimum(last, position + BM)
    for n0 in range(first_aligned(key_start, 0, BN), last, BN):
        n64 = tl.cast(n0, tl.int64)
        keys = n0 + cols
        k = load_rows(
            K + n64 * k_row + cols[None, :] * k_row + dims[:, None],
            keys[None, :],
            key_start,
            key_end,
            dims[:, None],
            D,
            EVEN_N,
            EVEN_D,
        )  # [BLOCK_D, BN]
        if BIAS == DENSE:
            bias_tile = Bias + lanes[:, None] * bias_row + keys[None, :]
            in_bias = None
            if not (EVEN_M and EVEN_N) or BIAS_PLACE == AFTER:
                in_bias = (keys[None, :] < N) & (rows[:, None] < M)
            if BIAS_PLACE != AFTER:
                bias = load_bias(bias_tile, in_bias, False, False)
        s = tl.dot(q, k, input_precision=PRECISION)
        distance = keys[None, :] - (position + lanes[:, None])
        # A far tile is never touched element by element: its scale and its constant bias go into the exponent below.
        factor = scale * LOG2E
        constant = 0.0
        if BIAS == ALIBI or BIAS == ALIBI_SIGNED:
            s = s * scale + slope * alibi_distance(distance, BIAS)
            factor = LOG2E
        elif BIAS == DENSE:
            if BIAS_PLACE == AFTER:
                bias = load_bias(bias_tile, in_bias, False, False)
            s = s * scale + bias
            factor = LOG2E
        if tile_is_special(position, n0, key_start, key_end, BM, BN, BIAS, RADIUS, CAUSAL, not EVEN_N):
            if BIAS == DISTANCE:
                s = s * scale + table_bias(distance, Bias, RADIUS, ASM)
                factor = LOG2E
            s = mask_scores(s, distance, keys[None, :], key_start, key_end, CAUSAL, not EVEN_N)
        elif BIAS == DISTANCE:
            constant = tl.where(n0 < position, left, right)
        new_peak = tl.maximum(peak, tl.max(s, 1) * factor + constant)
        p = tl.exp2(s * factor - (new_peak - constant)[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(p, 1)
        peak = new_peak
        acc = acc * decay[:, None]
        if DROPOUT:
            p = tl.where(
                keep_weights(
                    q_first + batch64 * M + rows[:, None], k_first + batch64 * N + keys[None, :], head, Seed, threshold
                ),
                p,
                0.0,
            )
        v = load_rows(
            V + n64 * v_row + cols[:, None] * v_row + dims[None, :],
            keys[:, None],
            key_start,
            key_end,
            dims[None, :],
            D,
            EVEN_N,
            EVEN_D,
        )  # [BN, BLOCK_D]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        if SETTLE and ASM:
            acc = settled(acc)

    seen = total > 0
    inverse = tl.where(seen, keep_scale / tl.where(seen, total, 1.0), 0.0)
    out = O + batch64 * o_batch + head64 * o_head + (q_first + m0) * o_row + lanes[:, None] * o_row + dims[None, :]
    inside = (rows[:, None] < num_queries) & (dims[None, :] < D)
    tl.store(out, (acc * inverse[:, None]).to(O.dtype.element_ty), mask=inside)
    lse = tl.where(seen, peak + tl.log2(tl.where(seen, total, 1.0)), float("inf"))
    tl.store(LSE + (batch64 * H + head) * M + q_first + rows, lse, mask=rows < num_queries)
