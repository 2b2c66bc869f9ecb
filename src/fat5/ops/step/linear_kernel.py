"""The kernel of a linear layer for a few rows, with what stands before and behind it."""

from __future__ import annotations

import triton
import triton.language as tl

from fat5.ops.activation.kernels import gelu_factor
from fat5.ops.dependent_launch import gdc_launch_dependents, gdc_wait
from fat5.ops.norm.residual import FLOAT16_LIMIT

NOT_GATED, TANH, ERF = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_LIMIT = tl.constexpr(FLOAT16_LIMIT)
_LARGEST_FLOAT16 = tl.constexpr(65504.0)


@triton.jit
def linear_kernel(
    X, Tokens, Residual, Norm, Weight, Out, Total, x_row, residual_row, num_rows, num_columns, eps,
    K: tl.constexpr, PARTS: tl.constexpr, BLOCK_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    GATED: tl.constexpr, CLAMP: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BM rows and BN columns of the output, all of the input's K columns at once.

    Rows of X are those that `Tokens` names, where there is one. K is cut in PARTS, one a warp: a product of so few rows
    is a chain of dependent instructions, which this makes shorter. The weights do not depend on the kernel before, so
    that their loads are under way when that one ends. Every program adds and normalises its rows again, which costs
    less than a kernel of its own; the first one of each row stores the sum.
    """
    parts = tl.arange(0, PARTS)[:, None, None] * BLOCK_K
    inner = tl.arange(0, BLOCK_K)
    across, down = parts + inner[None, None, :], parts + inner[None, :, None]  # [PARTS, 1, BLOCK_K], transposed
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = (down < K) & (columns[None, None, :] < num_columns)
    Weight += columns[None, None, :].to(tl.int64) * K + down
    weight = tl.load(Weight, mask=inside, other=0.0)
    up_weight = weight
    if GATED != NOT_GATED:
        up_weight = tl.load(Weight + tl.cast(num_columns, tl.int64) * K, mask=inside, other=0.0)
    gain = 1.0
    if Norm is not None:
        gain = tl.load(Norm + across, mask=across < K, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    real = (rows[None, :, None] < num_rows) & (across < K)
    source = rows
    if Tokens is not None:
        source = tl.load(Tokens + rows, mask=rows < num_rows, other=0)
    x = tl.load(X + source[None, :, None].to(tl.int64) * x_row + across, mask=real, other=0.0)
    if Residual is not None:
        other = tl.load(Residual + rows[None, :, None].to(tl.int64) * residual_row + across, mask=real, other=0.0)
        total = x.to(tl.float32) + other.to(tl.float32)
        if CLAMP:
            total = tl.clamp(total, -_LIMIT, _LIMIT, propagate_nan=tl.PropagateNan.ALL)
        x = total.to(x.dtype)
    if Total is not None:
        first = tl.program_id(0) == 0
        tl.store(Total + rows[None, :, None].to(tl.int64) * K + across, x, mask=real & first)
    if Norm is not None:
        h = x.to(tl.float32)  # the norm sees the rounded sum, as it does in a kernel of its own
        rstd = tl.rsqrt(tl.sum(tl.sum(h * h, 2), 0) / K + eps)
        x = (h * rstd[None, :, None] * gain).to(x.dtype)
    out = tl.sum(tl.dot(x, weight, input_precision=PRECISION), 0)  # [BM, BN]
    if GATED != NOT_GATED:
        # Rounded as the outputs of two layers are.
        gate = out.to(x.dtype).to(tl.float32)
        up = tl.sum(tl.dot(x, up_weight, input_precision=PRECISION), 0).to(x.dtype).to(tl.float32)
        out = gate * gelu_factor(gate, GATED == TANH) * up
        if CLAMP:  # an infinity would be NaN after the next layer
            out = tl.clamp(out, -_LARGEST_FLOAT16, _LARGEST_FLOAT16, propagate_nan=tl.PropagateNan.ALL)
    place = Out + rows[:, None].to(tl.int64) * num_columns + columns[None, :]
    tl.store(place, out.to(Out.dtype.element_ty), mask=(rows[:, None] < num_rows) & (columns[None, :] < num_columns))
