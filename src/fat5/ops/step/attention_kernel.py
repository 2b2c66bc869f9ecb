"""The kernel of attention of one query a row to a cache, which it extends.

With one query the products have nothing to multiply twice, so that matrix units gain nothing: keys and values stay in
the registers that they are loaded into, and the two tiles after each other are on their way at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fat5.ops.attention.tile_scores import LOG2E, table_bias
from fat5.ops.dependent_launch import gdc_launch_dependents, gdc_wait


@triton.jit
def _load_tile(K, V, keys, first, last, k_row, v_row, dims, inside):
    """Load the keys and values of a tile, 0 where they are not real."""
    real = ((keys >= first) & (keys < last))[:, None] & inside
    rows = keys[:, None].to(tl.int64)
    k = tl.load(K + rows * k_row + dims, mask=real, other=0.0)
    return k, tl.load(V + rows * v_row + dims, mask=real, other=0.0)


@triton.jit
def attention_kernel(
    Q, K, V, O, NewK, NewV, Table, Positions, KeyStarts, KeyLengths,  # noqa: E741
    scale, q_batch, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, new_batch, new_head, heads, num_keys,
    BN: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, RADIUS: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: the query of one head of one row, over all of its keys.

    With `NewK` the query's own key and value are the first that it sees, and are stored in the slot of its position.
    What the cache holds before that was written by earlier steps, whose kernels have ended: unlike the query it may be
    loaded before the kernel in front has ended.
    """
    dims = tl.arange(0, BLOCK_D)[None, :]
    inside = dims < D
    pair = tl.program_id(0)
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    start, end, position = 0, num_keys, num_keys
    if KeyStarts is not None:
        start = tl.minimum(tl.maximum(tl.load(KeyStarts + batch).to(tl.int32), 0), num_keys)
    if KeyLengths is not None:
        end = tl.minimum(start + tl.maximum(tl.load(KeyLengths + batch).to(tl.int32), 0), num_keys)
    last = end
    if Positions is not None:
        position = tl.load(Positions + batch).to(tl.int32)
        last = tl.minimum(end, position)
    K += batch * k_batch + head * k_head
    V += batch * v_batch + head * v_head
    keys = start // BN * BN + tl.arange(0, BN)
    k, v = _load_tile(K, V, keys, start, last, k_row, v_row, dims, inside)
    next_k, next_v = _load_tile(K, V, keys + BN, start, last, k_row, v_row, dims, inside)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    q = tl.load(Q + batch * q_batch + head * q_head + dims, mask=inside, other=0.0).to(tl.float32) * (scale * LOG2E)
    peak = -1e30  # finite: hidden keys alone then sum to 0, without NaN
    total = 0.0
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    if Table is not None:
        Table += head * (2 * RADIUS + 1) + RADIUS
    if NewK is not None:
        new = batch * new_batch + head * new_head + dims
        new_k = tl.load(NewK + new, mask=inside, other=0.0)
        new_v = tl.load(NewV + new, mask=inside, other=0.0)
        fits = inside & (position >= 0) & (position < num_keys)
        tl.store(K + position.to(tl.int64) * k_row + dims, new_k, mask=fits)
        tl.store(V + position.to(tl.int64) * v_row + dims, new_v, mask=fits)
        if (position >= start) & (position < end):
            peak = tl.sum(q * new_k.to(tl.float32))
            if Table is not None:
                peak += tl.load(Table) * LOG2E
            total = 1.0
            acc = new_v.to(tl.float32)
    for first in range(start // BN * BN, last, BN):
        keys = first + tl.arange(0, BN)
        s = tl.sum(q * k.to(tl.float32), 1)
        if Table is not None:
            s += table_bias(keys - position, Table, RADIUS, ASM) * LOG2E
        s = tl.where((keys >= start) & (keys < last), s, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(s, 0))
        p = tl.exp2(s - new_peak)
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(p, 0)
        acc = acc * decay + tl.sum(p[:, None] * v.to(tl.float32), 0)[None, :]
        peak = new_peak
        k, v = next_k, next_v
        next_k, next_v = _load_tile(K, V, keys + 2 * BN, start, last, k_row, v_row, dims, inside)
    acc = tl.where(total > 0, acc / tl.where(total > 0, total, 1.0), 0.0)
    tl.store(O + pair.to(tl.int64) * D + dims, acc.to(O.dtype.element_ty), mask=inside)
