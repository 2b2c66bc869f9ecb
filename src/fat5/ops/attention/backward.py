"""The backward kernels for the statistics of rows and for the gradients of keys and values.

Exponents are of 2: `scale`, tables and slopes come multiplied by log2(e). Multiplying in the kernel, as the forward
does, costs 12 % here (measured on an H200).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fat5.ops.attention.tile_scores import (
    AFTER,
    ALIBI,
    ALIBI_SIGNED,
    BEFORE,
    DENSE,
    DISTANCE,
    LOG2E,
    START,
    TURNED,
    alibi_distance,
    keep_weights,
    load_bias,
    load_rows,
    load_stats,
    mask_scores,
    sequence_bounds,
    settled,
    table_bias,
    tile_is_special,
)


@triton.jit
def delta_kernel(
    O,  # noqa: E741
    DO,
    LSE,
    Stats,
    o_batch,
    o_row,
    o_head,
    do_batch,
    do_row,
    do_head,
    heads,
    num_rows,
    Table,
    Log2Table,
    BM: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RADIUS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Stats [B, H, rows, 2] or [H, total, 2], float32: LSE and delta = rowsum(O * dO) of each row side by side.

    Also the table by distance, if there is one, times log2(e).
    """
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    dims = tl.arange(0, BLOCK_D)
    inside = (rows[:, None] < num_rows) & (dims[None, :] < D)
    rows64 = rows[:, None].to(tl.int64)
    o = tl.load(O + batch * o_batch + head * o_head + rows64 * o_row + dims[None, :], mask=inside, other=0.0)
    do = tl.load(DO + batch * do_batch + head * do_head + rows64 * do_row + dims[None, :], mask=inside, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    place = tl.program_id(1).to(tl.int64) * num_rows + rows
    lse = tl.load(LSE + place, mask=rows < num_rows, other=0.0)
    pairs = Stats + 2 * place[:, None] + tl.arange(0, 2)[None, :]
    tl.store(pairs, tl.join(lse, delta), mask=rows[:, None] < num_rows)
    if Table is not None:
        if (tl.program_id(0) == 0) & (tl.program_id(1) < heads):  # one program a head
            entries = tl.arange(0, WIDTH)
            row = head * (2 * RADIUS + 1)
            in_table = entries <= 2 * RADIUS
            values = tl.load(Table + row + entries, mask=in_table, other=0.0)
            tl.store(Log2Table + row + entries, LOG2E * values, mask=in_table)


@triton.jit
def key_value_kernel(
    Q,
    K,
    V,
    DO,
    DK,
    DV,
    Stats,
    Bias,
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
    dk_batch,
    dk_row,
    dk_head,
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
    PAIRED_STATS: tl.constexpr,
    BIAS_PLACE: tl.constexpr,
    SETTLE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: the gradients of BN keys and values of one head, over all queries. Scores are transposed, [BN, BM].

    One loop with a uniform branch: with three loops (far, near, far) the assembler serialises the matrix products.
    """
    EVEN_D: tl.constexpr = BLOCK_D == D
    dims = tl.arange(0, BLOCK_D)
    cols = tl.arange(0, BN)
    if VARLEN:
        seq = tl.load(Tiles + 2 * tl.program_id(0))
        block = tl.load(Tiles + 2 * tl.program_id(0) + 1)
        head = tl.program_id(1)
        batch = 0
        if seq < 0:  # rows that belong to no document; `block` is the first
            keys = block + cols
            place = head.to(tl.int64) * dk_head + keys[:, None].to(tl.int64) * dk_row + dims[None, :]
            zeros = tl.zeros([BN, BLOCK_D], DK.dtype.element_ty)
            inside = (keys[:, None] < N) & (dims[None, :] < D)
            tl.store(DK + place, zeros, mask=inside)
            tl.store(DV + place, zeros, mask=inside)
            return
    else:
        block = tl.program_id(0)
        seq = tl.program_id(1) // H
        head = tl.program_id(1) % H
        batch = seq
    q_first, k_first, num_queries, key_start, key_end, shift = sequence_bounds(
        seq, CuQ, CuK, KeyStarts, KeyLengths, Offsets, offset, M, N, VARLEN, OFFSET, HAS_STARTS, HAS_LENGTHS
    )
    head64 = head.to(tl.int64)
    batch64 = tl.cast(batch, tl.int64)
    n0 = block * BN
    keys = n0 + cols
    lanes = tl.arange(0, BM)

    Q += batch64 * q_batch + head64 * q_head + q_first * q_row
    DO += batch64 * do_batch + head64 * do_head + q_first * do_row
    K += batch64 * k_batch + head64 * k_head + (k_first + n0) * k_row
    V += batch64 * v_batch + head64 * v_head + (k_first + n0) * v_row
    Stats += ((batch64 * H + head) * M + q_first) * 2
    k = load_rows(
        K + cols[:, None] * k_row + dims[None, :], keys[:, None], key_start, key_end, dims[None, :], D, EVEN_N, EVEN_D
    )
    v = load_rows(
        V + cols[:, None] * v_row + dims[None, :], keys[:, None], key_start, key_end, dims[None, :], D, EVEN_N, EVEN_D
    )
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
        Bias += batch64 * bias_batch + head64 * bias_head

    dk = tl.zeros([BN, BLOCK_D], tl.float32)
    dv = tl.zeros([BN, BLOCK_D], tl.float32)
    first = 0
    if CAUSAL:
        first = tl.maximum(n0 - shift, 0) // BM * BM
    last = num_queries
    if not EVEN_N:
        last = tl.where((n0 < key_end) & (n0 + BN > key_start), last, 0)
    for m0 in range(first, last, BM):
        m64 = tl.cast(m0, tl.int64)
        rows = m0 + lanes
        qt = load_rows(
            Q + m64 * q_row + lanes[None, :] * q_row + dims[:, None],
            rows[None, :],
            0,
            num_queries,
            dims[:, None],
            D,
            EVEN_M,
            EVEN_D,
        )  # [BLOCK_D, BM]
        if BIAS == DENSE:
            bias_tile = Bias + m64 * bias_row + lanes[:, None] * bias_row + keys[None, :]
            in_bias = (keys[None, :] < N) & (rows[:, None] < M)
            if BIAS_PLACE == BEFORE or BIAS_PLACE == START:
                bias = tl.trans(load_bias(bias_tile, None if EVEN_M and EVEN_N else in_bias, False, False))
        if BIAS == DENSE and BIAS_PLACE == START:
            s = tl.dot(k, qt, bias * (LOG2E / scale), input_precision=PRECISION)
        else:
            s = tl.dot(k, qt, input_precision=PRECISION)  # [BN, BM]
        position = m0 + shift
        distance = keys[:, None] - (position + lanes[None, :])
        factor = scale
        constant = 0.0
        if BIAS == ALIBI or BIAS == ALIBI_SIGNED:
            s = s * scale + slope * alibi_distance(distance, BIAS)
            factor = 1.0
        elif BIAS == DENSE and BIAS_PLACE != START:
            if BIAS_PLACE == TURNED:  # asynchronous copies, and no barrier but the pipeline's own
                bias_tile = Bias + m64 * bias_row + lanes[None, :] * bias_row + keys[:, None]
                bias = load_bias(bias_tile, (keys[:, None] < N) & (rows[None, :] < M), False, False)
            elif BIAS_PLACE == AFTER:  # half the shared memory of a turned load
                bias = tl.trans(load_bias(bias_tile, in_bias, False, False))
            s = s * scale + LOG2E * bias
            factor = 1.0
        if tile_is_special(position, n0, key_start, key_end, BM, BN, BIAS, RADIUS, CAUSAL, not EVEN_N):
            if BIAS == DISTANCE:
                s = s * scale + table_bias(distance, Bias, RADIUS, ASM)
                factor = 1.0
            s = mask_scores(s, distance, keys[:, None], key_start, key_end, CAUSAL, not EVEN_N)
        elif BIAS == DISTANCE:
            constant = tl.where(n0 < position, left, right)
        lse, delta = load_stats(Stats, rows, num_queries, EVEN_M, PAIRED_STATS)
        p = tl.exp2(s * factor - (lse - constant)[None, :])
        do = load_rows(
            DO + m64 * do_row + lanes[:, None] * do_row + dims[None, :],
            rows[:, None],
            0,
            num_queries,
            dims[None, :],
            D,
            EVEN_M,
            EVEN_D,
        )  # [BM, BLOCK_D]
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        if DROPOUT:
            keep = keep_weights(
                q_first + batch64 * M + rows[None, :], k_first + batch64 * N + keys[:, None], head, Seed, threshold
            )
            dv = tl.dot(tl.where(keep, p, 0.0).to(do.dtype), do, dv, input_precision=PRECISION)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        else:
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(qt.dtype), tl.trans(qt), dk, input_precision=PRECISION)
        if SETTLE and ASM:
            dk = settled(dk)

    place = batch64 * dk_batch + head64 * dk_head + (k_first + n0) * dk_row + cols[:, None] * dk_row + dims[None, :]
    num_keys = N
    if VARLEN:
        num_keys = key_end
    inside = (keys[:, None] < num_keys) & (dims[None, :] < D)
    tl.store(DK + place, (dk * softmax_scale).to(DK.dtype.element_ty), mask=inside)
    tl.store(DV + place, (dv * keep_scale).to(DV.dtype.element_ty), mask=inside)
