"""The kernels of the losses.

A row counts if its label lies in [0, vocab_size) and is not the ignored one; of any other row no logit is read.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-1e38)  # finite, so that a first block of -inf gives a sum of 0 and no NaN


@triton.jit
def is_kept(label, ignore_index, vocab_size):
    """Whether a row counts. A label out of range does not: the assertion on it comes later than this read."""
    return (label != ignore_index) & (label >= 0) & (label < vocab_size)


@triton.jit
def row_scale(Count, MEAN: tl.constexpr):
    """Return what the gradient of one row's loss is multiplied by."""
    if MEAN:
        return 1.0 / tl.maximum(tl.load(Count), 1).to(tl.float32)
    else:
        return 1.0


@triton.jit
def store_nothing(row, Loss, ZLoss, Correct, LSE):
    """Store the results of a row that does not count."""
    tl.store(Loss + row, 0.0)
    tl.store(ZLoss + row, 0.0)
    tl.store(Correct + row, 0)
    tl.store(LSE + row, 0.0)


@triton.jit
def store_results(row, at_label, mean, lse, correct, smoothing, z_weight, Loss, ZLoss, Correct, LSE):
    """Store the results of a row that counts; `mean` is that of its logits."""
    z_share = z_weight * lse * lse
    tl.store(Loss + row, lse - at_label + smoothing * (at_label - mean) + z_share)
    tl.store(ZLoss + row, z_share)
    tl.store(Correct + row, correct.to(tl.int8))
    tl.store(LSE + row, lse)


@triton.jit
def store_zeros(G, vocab_size, BLOCK: tl.constexpr):
    """Store the gradient of a row that does not count."""
    lanes = tl.arange(0, BLOCK)
    for start in range(0, vocab_size, BLOCK):
        cols = start + lanes
        tl.store(G + cols, tl.zeros([BLOCK], G.dtype.element_ty), mask=cols < vocab_size)


@triton.jit
def store_at_label(G, label, at_label, offset, factor, shift, smoothing, scale, EXACT: tl.constexpr):
    """Store the gradient at the label over what the row's other threads stored there."""
    tl.debug_barrier()
    value = numerators(at_label, shift, EXACT) * factor + offset - (1.0 - smoothing) * scale
    tl.store(G + label, value.to(G.dtype.element_ty))


@triton.jit
def numerators(x, peak, EXACT: tl.constexpr):
    """Return exp(x - peak): with one rounding less, or with one fused multiply-add."""
    if EXACT:
        return tl.exp2((x - peak) * LOG2E)
    else:
        return tl.exp2(x * LOG2E - peak * LOG2E)


@triton.jit
def row_kernel(
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
    vocab_size,
    ignore_index,
    smoothing,
    z_weight,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    SMOOTHED: tl.constexpr,
    GRADIENT: tl.constexpr,
    MEAN: tl.constexpr,
):
    """One program: one row of logits of any type and length, block by block with a running maximum.

    The gradient reads the row a second time, from the last block to the first: the latest are still in the cache. G may
    be the same memory as X.
    """
    EXACT: tl.constexpr = X.dtype.element_ty == tl.float32
    row = tl.program_id(0)
    row64 = row.to(tl.int64)
    label = tl.load(Labels + row)
    X += row64 * x_row
    G += row64 * g_row
    if not is_kept(label, ignore_index, vocab_size):
        store_nothing(row, Loss, ZLoss, Correct, LSE)
        if GRADIENT:
            store_zeros(G, vocab_size, BLOCK)
        return
    lanes = tl.arange(0, BLOCK)
    at_label = tl.load(X + label).to(tl.float32)
    scale = row_scale(Count, MEAN)  # long before it is needed
    peak = _LOWEST
    total = 0.0
    sums = 0.0
    peak_block = 0
    for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
        columns = start + lanes
        if EVEN:
            x = tl.load(X + columns).to(tl.float32)
        else:
            x = tl.load(X + columns, mask=columns < vocab_size, other=-float("inf")).to(tl.float32)
        block_peak = tl.max(x, 0)
        peak_block = tl.where(block_peak > peak, start, peak_block)
        new_peak = tl.maximum(peak, block_peak)
        total = total * numerators(peak, new_peak, True) + tl.sum(numerators(x, new_peak, EXACT), 0)
        peak = new_peak
        if SMOOTHED:
            sums += tl.sum(tl.where(columns < vocab_size, x, 0.0), 0)
    correct = (at_label == peak) & (label >= peak_block) & (label < peak_block + BLOCK)
    if correct:
        columns = peak_block + lanes
        x = tl.load(X + columns, mask=columns < label, other=-float("inf")).to(tl.float32)
        correct = tl.max(x, 0) < peak
    mean = at_label
    if SMOOTHED:
        mean = sums / vocab_size
    lse = peak + tl.log(total)
    store_results(row, at_label, mean, lse, correct, smoothing, z_weight, Loss, ZLoss, Correct, LSE)
    if GRADIENT:
        factor = scale * (1.0 + 2.0 * z_weight * lse) / total
        offset = -smoothing * scale / vocab_size
        blocks = tl.cdiv(vocab_size, BLOCK)
        for done in tl.range(0, blocks, num_stages=STAGES):
            columns = (blocks - 1 - done) * BLOCK + lanes
            if EVEN:
                x = tl.load(X + columns).to(tl.float32)
            else:
                x = tl.load(X + columns, mask=columns < vocab_size, other=-float("inf")).to(tl.float32)
            gradient = (numerators(x, peak, EXACT) * factor + offset).to(G.dtype.element_ty)
            if EVEN:
                tl.store(G + columns, gradient)
            else:
                tl.store(G + columns, gradient, mask=columns < vocab_size)
        store_at_label(G, label, at_label, offset, factor, peak, smoothing, scale, EXACT)


@triton.jit
def gradient_kernel(
    X,
    G,
    Labels,
    LSE,
    Grad,
    x_row,
    g_row,
    grad_row,
    vocab_size,
    ignore_index,
    smoothing,
    z_weight,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
):
    """One program: BLOCK columns of the gradient of one row, from its log-sum-exp. G may be the same memory as X."""
    row = tl.program_id(0)
    row64 = row.to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab_size
    label = tl.load(Labels + row)
    G += row64 * g_row
    if is_kept(label, ignore_index, vocab_size):
        lse = tl.load(LSE + row)
        grad = tl.load(Grad + row64 * grad_row).to(tl.float32)
        X += row64 * x_row
        if EVEN:
            x = tl.load(X + columns).to(tl.float32)
        else:
            x = tl.load(X + columns, mask=inside, other=0.0).to(tl.float32)
        factor = grad * (1.0 + 2.0 * z_weight * lse)
        gradient = numerators(x, lse, True) * factor - smoothing * grad / vocab_size
        gradient = gradient - tl.where(columns == label, (1.0 - smoothing) * grad, 0.0)
        if EVEN:
            tl.store(G + columns, gradient.to(G.dtype.element_ty))
        else:
            tl.store(G + columns, gradient.to(G.dtype.element_ty), mask=inside)
    else:
        tl.store(G + columns, tl.zeros([BLOCK], G.dtype.element_ty), mask=inside)


@triton.jit
def scale_kernel(G, Grad, size, BLOCK: tl.constexpr):
    """Multiply G by a scalar on the device; where that is 1, as for a loss that is the root, touch nothing."""
    grad = tl.load(Grad).to(tl.float32)
    if grad != 1.0:
        lanes = tl.arange(0, BLOCK)
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, size, step):
            elements = start + lanes
            x = tl.load(G + elements, mask=elements < size, other=0.0).to(tl.float32)
            tl.store(G + elements, (x * grad).to(G.dtype.element_ty), mask=elements < size)


@triton.jit
def scaled_kernel(X, Y, Grad, size, BLOCK: tl.constexpr):
    """Store X times a scalar on the device in Y, rounded to its type."""
    elements = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + elements, mask=elements < size, other=0.0).to(tl.float32)
    tl.store(Y + elements, (x * tl.load(Grad).to(tl.float32)).to(Y.dtype.element_ty), mask=elements < size)


@triton.jit
def labels_kernel(Labels, Count, Valid, size, vocab_size, ignore_index, BLOCK: tl.constexpr):
    """Count the labels that are not ignored, and store whether all of them lie in [0, vocab_size)."""
    lanes = tl.arange(0, BLOCK)
    kept = tl.zeros([BLOCK], tl.int32)
    wrong = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        labels = tl.load(Labels + start + lanes, mask=start + lanes < size, other=ignore_index)
        counts = labels != ignore_index
        kept += counts.to(tl.int32)
        wrong += (counts & ((labels < 0) | (labels >= vocab_size))).to(tl.int32)
    tl.store(Count, tl.sum(kept, 0).to(tl.int64))
    tl.store(Valid, (tl.sum(wrong, 0) == 0).to(tl.int8))


@triton.jit
def sums_kernel(Loss, ZLoss, Count, LossSum, ZSum, size, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """Store the sums of loss and z share over the rows, or their means over the kept ones, always in the same order."""
    lanes = tl.arange(0, BLOCK)
    loss = tl.zeros([BLOCK], tl.float32)
    z_share = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        inside = start + lanes < size
        loss += tl.load(Loss + start + lanes, mask=inside, other=0.0)
        z_share += tl.load(ZLoss + start + lanes, mask=inside, other=0.0)
    scale = row_scale(Count, MEAN)
    tl.store(LossSum, tl.sum(loss, 0) * scale)
    tl.store(ZSum, tl.sum(z_share, 0) * scale)
