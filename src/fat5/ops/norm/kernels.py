"""The kernels of the RMS norm, alone and behind a residual addition."""

from __future__ import annotations

import triton
import triton.language as tl

from fat5.ops.dependent_launch import gdc_launch_dependents, gdc_wait
from fat5.ops.norm.residual import FLOAT16_LIMIT

_LIMIT = tl.constexpr(FLOAT16_LIMIT)


@triton.jit
def _locate(tile, num_rows, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    """Rows [ROWS, 1] of a tile, its columns [1, BLOCK_D], and which elements exist."""
    rows = (tile * ROWS + tl.arange(0, ROWS))[:, None]
    columns = tl.arange(0, BLOCK_D)[None, :]
    inside = rows < num_rows
    if D != BLOCK_D:
        inside = inside & (columns < D)
    return rows, columns, inside


@triton.jit
def forward_kernel(
    X, Residual, Weight, Y, H, Rstd, x_row, residual_row, num_rows, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """Normalise one tile of rows; add `Residual` first, and write the sum to `H`, where there is one."""
    rows, columns, inside = _locate(tl.program_id(0), num_rows, D, BLOCK_D, ROWS)
    # All loads come before the sum over a row, a barrier that none could pass.
    h = tl.load(X + rows.to(tl.int64) * x_row + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(Weight + columns, mask=columns < D, other=0.0)
    out = rows.to(tl.int64) * D + columns
    if Residual is not None:
        h += tl.load(Residual + rows.to(tl.int64) * residual_row + columns, mask=inside, other=0.0).to(tl.float32)
        if CLAMP:
            h = tl.clamp(h, -_LIMIT, _LIMIT, propagate_nan=tl.PropagateNan.ALL)
        total = h.to(H.dtype.element_ty)
        tl.store(H + out, total, mask=inside)
        h = total.to(tl.float32)  # the norm sees the rounded sum, as it does without fusion
    rstd = tl.rsqrt(tl.sum(h * h, 1, keep_dims=True) / D + eps)
    tl.store(Rstd + rows, rstd, mask=rows < num_rows)
    tl.store(Y + out, (h * rstd * weight.to(tl.float32)).to(Y.dtype.element_ty), mask=inside)


@triton.jit
def _load_pieces(
    DY, DH, H, Rstd, dy_row, dh_row, h_row, tile, num_rows,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WITH_DH: tl.constexpr,
):  # fmt: skip
    """Load a tile of rows, each in pieces of COLUMNS, [ROWS, BLOCK_D / COLUMNS, COLUMNS]; zeros where nothing is.

    Triton gives the lanes of a warp to the last dimension, and the warps to the first once the last is full. So with
    pieces as wide as what the lanes load at once, and at least a row a warp, no sum over a row needs a barrier.
    """
    row = tile * ROWS + tl.arange(0, ROWS)
    rstd = tl.load(Rstd + row, mask=row < num_rows, other=0.0)[:, None, None]
    rows, columns = row[:, None, None], _piece_columns(BLOCK_D, COLUMNS)
    inside = rows < num_rows
    if D != BLOCK_D:
        inside = inside & (columns < D)
    dy = tl.load(DY + rows.to(tl.int64) * dy_row + columns, mask=inside, other=0.0)
    h = tl.load(H + rows.to(tl.int64) * h_row + columns, mask=inside, other=0.0)
    dh = dy
    if WITH_DH:
        dh = tl.load(DH + rows.to(tl.int64) * dh_row + columns, mask=inside, other=0.0)
    return dy, dh, h, rstd


@triton.jit
def _piece_columns(BLOCK_D: tl.constexpr, COLUMNS: tl.constexpr):
    return (tl.arange(0, BLOCK_D // COLUMNS) * COLUMNS)[None, :, None] + tl.arange(0, COLUMNS)[None, None, :]


@triton.jit
def backward_kernel(
    DY, DH, H, Weight, Rstd, DX, Parts, dy_row, dh_row, h_row, num_rows,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr,
    UNROLL: tl.constexpr, CLAMP: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """Gradient of the input, tile after tile, and this program's part of the weight's gradient.

    `DX` or `Parts` may be None where nobody asks for it; `DH` is the gradient that reaches the sum on other ways. AHEAD
    loads the next tile into registers while this one is computed: through shared memory, as Triton's own pipeline does,
    each tile would cost barriers. UNROLL turns at once, what was loaded ahead needs no copy, which would wait for it.
    LEADS lets the kernel that sums `Parts` start while this one ends.
    """
    WITH_DH: tl.constexpr = DX is not None and DH is not None
    columns = _piece_columns(BLOCK_D, COLUMNS)
    first, programs = tl.program_id(0), tl.num_programs(0)
    if AHEAD:
        dy, dh, h, rstd = _load_pieces(
            DY, DH, H, Rstd, dy_row, dh_row, h_row, first, num_rows, D, BLOCK_D, ROWS, COLUMNS, WITH_DH
        )
    weight = tl.load(Weight + columns, mask=columns < D, other=0.0).to(tl.float32)
    if LEADS:
        gdc_launch_dependents()
    part = tl.zeros([ROWS, BLOCK_D // COLUMNS, COLUMNS], tl.float32)
    for tile in tl.range(first, tl.cdiv(num_rows, ROWS), programs, loop_unroll_factor=UNROLL):
        if AHEAD:
            next_dy, next_dh, next_h, next_rstd = _load_pieces(
                DY, DH, H, Rstd, dy_row, dh_row, h_row, tile + programs, num_rows, D, BLOCK_D, ROWS, COLUMNS, WITH_DH
            )
        else:
            dy, dh, h, rstd = _load_pieces(
                DY, DH, H, Rstd, dy_row, dh_row, h_row, tile, num_rows, D, BLOCK_D, ROWS, COLUMNS, WITH_DH
            )
        wide = h.to(tl.float32)
        unit = wide * rstd
        if Parts is not None:
            part += dy.to(tl.float32) * unit
        if DX is not None:
            scaled = dy.to(tl.float32) * weight
            mean = tl.sum(tl.reshape(scaled * unit, [ROWS, BLOCK_D]), 1)[:, None, None] / D
            dx = (scaled - unit * mean) * rstd
            if DH is not None:
                dx += dh.to(tl.float32)
            if CLAMP:
                dx = tl.where(tl.abs(wide) < _LIMIT, dx, 0.0)
            rows = (tile * ROWS + tl.arange(0, ROWS))[:, None, None]
            inside = rows < num_rows
            if D != BLOCK_D:
                inside = inside & (columns < D)
            tl.store(DX + rows.to(tl.int64) * D + columns, dx.to(DX.dtype.element_ty), mask=inside)
        if AHEAD:
            dy, dh, h, rstd = next_dy, next_dh, next_h, next_rstd
    if Parts is not None:
        out = Parts + first.to(tl.int64) * D + columns
        tl.store(out, tl.sum(part, 0, keep_dims=True), mask=columns < D)


@triton.jit
def weight_kernel(
    DY, H, Rstd, Parts, dy_row, h_row, num_rows, D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """This program's part of the weight's gradient over a block of columns, where rows are too wide to keep one."""
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    part = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        rows = (tile * ROWS + tl.arange(0, ROWS))[:, None]
        inside = (rows < num_rows) & (columns < D)
        dy = tl.load(DY + rows.to(tl.int64) * dy_row + columns, mask=inside, other=0.0).to(tl.float32)
        h = tl.load(H + rows.to(tl.int64) * h_row + columns, mask=inside, other=0.0).to(tl.float32)
        part += dy * (h * tl.load(Rstd + rows, mask=rows < num_rows, other=0.0))
    tl.store(Parts + tl.program_id(0).to(tl.int64) * D + columns, tl.sum(part, 0)[None, :], mask=columns < D)


@triton.jit
def sum_kernel(
    Parts, Sum, num_parts, D: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, FOLLOWS: tl.constexpr
):  # fmt: skip
    """Sum the programs' parts in a fixed order; FOLLOWS if it may start before the kernel that stores them ends."""
    if FOLLOWS:
        gdc_wait()
    columns = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    parts = tl.arange(0, PARTS)[:, None]
    place = Parts + parts.to(tl.int64) * D + columns
    # Outside the loop, which rarely has a turn: in it the assembler adds before it has issued all loads.
    total = tl.load(place, mask=(parts < num_parts) & (columns < D), other=0.0)
    for first in range(PARTS, num_parts, PARTS):
        inside = (parts + first < num_parts) & (columns < D)
        total += tl.load(place + tl.cast(first, tl.int64) * D, mask=inside, other=0.0)
    tl.store(Sum + columns, tl.sum(total, 0)[None, :].to(Sum.dtype.element_ty), mask=columns < D)
