"""The kernels for a few queries a row, as in decoding with a cache: the keys are split among programs.

With one query the forward kernel would have a program a head, and a long row of keys would keep most of the card idle.
Here each program takes a share of the keys, and a second kernel joins the shares in a fixed order.

Source: Dao et al., Flash-Decoding for long-context inference (2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fat5.ops.attention.tile_scores import (
    ALIBI,
    ALIBI_SIGNED,
    DENSE,
    DISTANCE,
    LOG2E,
    alibi_distance,
    load_rows,
    sequence_bounds,
    table_bias,
)


@triton.jit
def decode_kernel(
    Q,
    K,
    V,
    O,  # noqa: E741
    LSE,
    Parts,
    PartLSE,
    Bias,
    KeyStarts,
    KeyLengths,
    Offsets,
    scale,
    offset,
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
    OFFSET: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    SPLIT: tl.constexpr,
    ASM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: all M <= BM queries of one head of one row, over its share of the keys.

    The shares are of what the row really has, so that a cache with many free slots keeps all programs busy. Without
    SPLIT there is one share, and the program writes the result itself. Exponents are of 2, as in the forward kernel.
    """
    EVEN_D: tl.constexpr = BLOCK_D == D
    dims = tl.arange(0, BLOCK_D)
    rows = tl.arange(0, BM)
    cols = tl.arange(0, BN)
    pair = tl.program_id(1)
    batch = pair // H
    head = pair % H
    _, _, _, key_start, key_end, shift = sequence_bounds(
        batch, None, None, KeyStarts, KeyLengths, Offsets, offset, M, N, False, OFFSET, HAS_STARTS, HAS_LENGTHS
    )
    if CAUSAL:
        key_end = tl.minimum(key_end, shift + M)
    first = key_start // BN * BN
    share = tl.cdiv(tl.cdiv(tl.maximum(key_end - first, 0), tl.num_programs(0)), BN) * BN
    first += tl.program_id(0) * share
    last = tl.minimum(first + share, key_end)

    batch64 = batch.to(tl.int64)
    head64 = head.to(tl.int64)
    Q += batch64 * q_batch + head64 * q_head
    K += batch64 * k_batch + head64 * k_head
    V += batch64 * v_batch + head64 * v_head
    q = load_rows(Q + rows[:, None] * q_row + dims[None, :], rows[:, None], 0, M, dims[None, :], D, False, EVEN_D)
    slope = 0.0
    if BIAS == DISTANCE:
        Bias += head64 * (2 * RADIUS + 1) + RADIUS
    elif BIAS == ALIBI or BIAS == ALIBI_SIGNED:
        slope = tl.load(Bias + head)
    elif BIAS == DENSE:
        Bias += batch64 * bias_batch + head64 * bias_head

    acc = tl.zeros([BM, BLOCK_D], tl.float32)
    peak = tl.full([BM], -1e30, tl.float32)  # finite: a row of hidden keys alone then sums to 0, without NaN
    total = tl.zeros([BM], tl.float32)
    for n0 in range(first, last, BN):
        n64 = tl.cast(n0, tl.int64)
        keys = n0 + cols
        k = load_rows(
            K + n64 * k_row + cols[None, :] * k_row + dims[:, None],
            keys[None, :], key_start, last, dims[:, None], D, False, EVEN_D,
        )  # fmt: skip
        s = tl.dot(q, k, input_precision=PRECISION) * scale  # [BM, BN]
        distance = keys[None, :] - (shift + rows[:, None])
        if BIAS == DISTANCE:
            s += table_bias(distance, Bias, RADIUS, ASM)
        elif BIAS == ALIBI or BIAS == ALIBI_SIGNED:
            s += slope * alibi_distance(distance, BIAS)
        elif BIAS == DENSE:
            inside = (rows[:, None] < M) & (keys[None, :] < N)
            s += tl.load(Bias + rows[:, None] * bias_row + keys[None, :], mask=inside, other=0.0).to(tl.float32)
        visible = (keys[None, :] >= key_start) & (keys[None, :] < last)
        if CAUSAL:
            visible = visible & (distance <= 0)
        s = tl.where(visible, s * LOG2E, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(s, 1))
        p = tl.exp2(s - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(p, 1)
        peak = new_peak
        v = load_rows(
            V + n64 * v_row + cols[:, None] * v_row + dims[None, :],
            keys[:, None], key_start, last, dims[None, :], D, False, EVEN_D,
        )  # fmt: skip
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)

    seen = total > 0
    total = tl.where(seen, total, 1.0)
    acc = acc * tl.where(seen, 1.0 / total, 0.0)[:, None]
    lse = peak + tl.log2(total)
    if SPLIT:
        part = pair.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        tl.store(PartLSE + part * M + rows, tl.where(seen, lse, -float("inf")), mask=rows < M)
        out = Parts + (part * M + rows[:, None]) * D + dims[None, :]
    else:
        tl.store(LSE + pair.to(tl.int64) * M + rows, tl.where(seen, lse, float("inf")), mask=rows < M)
        out = O + batch64 * o_batch + head64 * o_head + rows[:, None] * o_row + dims[None, :]
    tl.store(out, acc.to(out.dtype.element_ty), mask=(rows[:, None] < M) & (dims[None, :] < D))


@triton.jit
def join_kernel(
    Parts, PartLSE, O, LSE, o_batch, o_row, o_head, H, M, splits,  # noqa: E741
    D: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One program: one query of one head of one row. Weighs the shares' results by their sums of exponentials."""
    pair = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    parts = tl.arange(0, SPLITS)
    dims = tl.arange(0, BLOCK_D)
    source = (pair * splits + parts) * M + row
    lse = tl.load(PartLSE + source, mask=parts < splits, other=-float("inf"))
    peak = tl.max(lse, 0)
    seen = peak > -float("inf")
    weights = tl.exp2(lse - tl.where(seen, peak, 0.0))
    total = tl.sum(weights, 0)
    inside = (parts[:, None] < splits) & (dims[None, :] < D)
    values = tl.load(Parts + source[:, None] * D + dims[None, :], mask=inside, other=0.0)  # [SPLITS, BLOCK_D]
    total = tl.where(seen, total, 1.0)
    out = tl.sum(values * weights[:, None], 0) / total
    place = O + pair // H * o_batch + pair % H * o_head + row * o_row + dims
    tl.store(place, out.to(O.dtype.element_ty), mask=dims < D)
    tl.store(LSE + pair * M + row, tl.where(seen, peak + tl.log2(total), float("inf")))
