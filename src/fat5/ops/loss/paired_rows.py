"""The kernel of rows that stay in registers, as pairs of bf16, between loss and gradient."""

from __future__ import annotations

import triton
import triton.language as tl

from fat5.ops.loss.kernels import (
    is_kept,
    numerators,
    row_scale,
    store_at_label,
    store_nothing,
    store_results,
    store_zeros,
)

_PAIR_OF_MINUS_INFINITIES = tl.constexpr(-8323200)  # 0xFF80FF80: two bf16 in one int32


@triton.jit
def halves(pairs):
    """Return the two bf16 of each int32, the first one first, as float32."""
    return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)


@triton.jit
def again(pairs, ASM: tl.constexpr):
    """Return the same value, unknown to the compiler: it unpacks it again and need not keep the row in float32."""
    if ASM:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [pairs], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return pairs


@triton.jit
def highest_before(X, label, SEARCH: tl.constexpr):
    """Return the highest bf16 logit in front of the label; X is int32 and names pairs."""
    columns = tl.arange(0, SEARCH)
    highest = tl.full([SEARCH], -float("inf"), tl.float32)
    for start in range(0, (label + 1) // 2, SEARCH):
        first, second = halves(tl.load(X + start + columns, mask=2 * (start + columns) < label, other=0))
        first = tl.where(2 * (start + columns) < label, first, -float("inf"))
        second = tl.where(2 * (start + columns) + 1 < label, second, -float("inf"))
        highest = tl.maximum(highest, tl.maximum(first, second))
    return tl.max(highest, 0)


@triton.jit
def load_pairs(X, label, inside, kept, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Return the pair of the label's logit, and a row as int32 [BLOCK // 2]; nothing is read of an ignored row."""
    at_pair = tl.load(X + (label >> 1), mask=kept, other=0)
    columns = tl.arange(0, BLOCK // 2)
    if EVEN:
        pairs = tl.load(X + columns, mask=kept, other=_PAIR_OF_MINUS_INFINITIES)
    else:
        pairs = tl.load(X + columns, mask=inside & kept, other=_PAIR_OF_MINUS_INFINITIES)
    return at_pair, pairs


@triton.jit
def finish_pairs(
    row,
    label,
    at_pair,
    pairs,
    scale,
    inside,
    X,
    G,
    Loss,
    ZLoss,
    Correct,
    LSE,
    vocab_size,
    smoothing,
    z_weight,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    SMOOTHED: tl.constexpr,
    GRADIENT: tl.constexpr,
    ASM: tl.constexpr,
):
    """Store results and gradient of a row that counts. X and G name its first logit, `at_pair` holds its label's."""
    at_first, at_second = halves(at_pair)
    at_label = tl.where(label & 1 == 0, at_first, at_second)
    first, second = halves(pairs)
    peak = tl.max(tl.maximum(first, second), 0)
    correct = at_label == peak
    if correct:  # rare enough to read the row again, which keeps registers free
        correct = highest_before(X, label, BLOCK // 16) < peak
    mean = at_label
    if SMOOTHED:
        first, second = halves(again(pairs, ASM))
        mean = tl.sum(tl.where(inside, first + second, 0.0), 0) / vocab_size
    first, second = halves(again(pairs, ASM))
    total = tl.sum(numerators(first, peak, False) + numerators(second, peak, False), 0)
    lse = peak + tl.log(total)
    store_results(row, at_label, mean, lse, correct, smoothing, z_weight, Loss, ZLoss, Correct, LSE)
    if GRADIENT:
        factor = scale * (1.0 + 2.0 * z_weight * lse) / total
        offset = -smoothing * scale / vocab_size
        first, second = halves(again(pairs, ASM))
        gradient = tl.join(
            numerators(first, peak, False) * factor + offset, numerators(second, peak, False) * factor + offset
        )
        gradient = tl.reshape(gradient, [BLOCK]).to(G.dtype.element_ty)
        columns = tl.arange(0, BLOCK)
        if EVEN:
            tl.store(G + columns, gradient)
        else:
            tl.store(G + columns, gradient, mask=columns < vocab_size)
        store_at_label(G, label, at_label, offset, factor, peak, smoothing, scale, False)


@triton.jit
def paired_row_kernel(
    X,
    G,
    Labels,
    Count,
    Loss,
    ZLoss,
    Correct,
    LSE,
    x_row,
    g_row,
    num_rows,
    vocab_size,
    ignore_index,
    smoothing,
    z_weight,
    BLOCK: tl.constexpr,
    PREFETCH: tl.constexpr,
    EVEN: tl.constexpr,
    SMOOTHED: tl.constexpr,
    GRADIENT: tl.constexpr,
    MEAN: tl.constexpr,
    ASM: tl.constexpr,
):
    """Rows of bf16 logits, read once and held in registers as pairs until their gradient is stored.

    One row a program; with PREFETCH a program takes row after row and loads the next while it works on one. X is the
    logits seen as int32, `x_row` its stride in pairs; G may be the same memory. Rows are even and at most BLOCK long.
    """
    row = tl.program_id(0)
    inside = tl.arange(0, BLOCK // 2) < vocab_size // 2
    label = tl.load(Labels + row)
    kept = is_kept(label, ignore_index, vocab_size)
    scale = row_scale(Count, MEAN)  # long before it is needed
    at_pair, pairs = load_pairs(X + row.to(tl.int64) * x_row, label, inside, kept, BLOCK, EVEN)
    more = True
    while more:
        next_row = row + tl.num_programs(0)
        next_label = label
        next_kept = kept
        next_at_pair = at_pair
        next_pairs = pairs
        if PREFETCH:
            more = next_row < num_rows
            next_label = tl.load(Labels + next_row, mask=more, other=ignore_index)
            next_kept = is_kept(next_label, ignore_index, vocab_size)
            next_x = X + next_row.to(tl.int64) * x_row
            next_at_pair, next_pairs = load_pairs(next_x, next_label, inside, next_kept, BLOCK, EVEN)
        else:
            more = False
        gradient = G + row.to(tl.int64) * g_row
        if kept:
            finish_pairs(
                row, label, at_pair, pairs, scale, inside, X + row.to(tl.int64) * x_row, gradient, Loss, ZLoss, Correct,
                LSE, vocab_size, smoothing, z_weight, BLOCK, EVEN, SMOOTHED, GRADIENT, ASM,
            )  # fmt: skip
        else:
            store_nothing(row, Loss, ZLoss, Correct, LSE)
            if GRADIENT:
                store_zeros(gradient, vocab_size, BLOCK)
        row = next_row
        label = next_label
        kept = next_kept
        at_pair = next_at_pair
        pairs = next_pairs
