"""Launching the norm's kernels: rows, grids, allocation."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fat5.ops.dependent_launch import dependent_launch, follower_options
from fat5.ops.launching import launch, on_device, processors
from fat5.ops.norm import tiles
from fat5.ops.norm.kernels import backward_kernel, forward_kernel, sum_kernel, weight_kernel
from fat5.ops.norm.tiles import RowTile
from fat5.ops.prepared_launch import LAUNCHES_KEPT, PreparedLaunch, ceil_divide, ceil_power_of_2


def run_forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise x, or the sum of x and residual.

    Args:
        x: [..., D].
        residual: Shaped as x, or None.
        weight: [D].
        eps: Added to the mean square.

    Returns:
        The normalised rows; the sum in the wider of both types, or x itself without a residual; and the reciprocal of
        each row's root mean square, float32 [rows].
    """
    width = x.shape[-1]
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    total = x if residual is None else torch.empty_like(y)
    rstd = x.new_empty(x.numel() // width, dtype=torch.float32)
    if x.numel() == 0:
        return y, total, rstd
    rows, other = _rows(x), None if residual is None else _rows(residual)
    block_d = ceil_power_of_2(width)

    def run(tile: RowTile) -> None:
        other_row, clamps = 0 if other is None else other.stride(0), _clamps(dtype, residual is not None)
        launch_rows = _forward_launch(tile, rows.shape[0], width, rows.stride(0), other_row, eps, clamps)
        launch_rows(rows, other, weight.contiguous(), y, total, rstd)

    with on_device(x):
        size = (block_d, x.element_size(), residual is not None)
        launch("rms_norm forward", size, x.device, tiles.forward_tile(block_d), tiles.forward_candidates(block_d), run)
    return y, total, rstd


@functools.lru_cache(LAUNCHES_KEPT)
def _forward_launch(
    tile: RowTile, rows: int, width: int, row: int, other_row: int, eps: float, clamps: bool
) -> PreparedLaunch:
    return PreparedLaunch(
        forward_kernel, (ceil_divide(rows, tile.rows),), x_row=row, residual_row=other_row, num_rows=rows, eps=eps,
        D=width, BLOCK_D=ceil_power_of_2(width), ROWS=tile.rows, CLAMP=clamps, **tile.options(),
    )  # fmt: skip


def run_backward(
    grad_y: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    weight: Tensor,
    rstd: Tensor,
    fused: bool,
    input_grad: bool,
    weight_grad: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of what was normalised, in its type, and of the weight, in its own.

    Args:
        grad_y: Gradient of the normalised rows.
        grad_total: Gradient of the sum besides, or None.
        total: What was normalised, [..., D].
        weight: [D].
        rstd: From the forward.
        fused: It was a sum.
        input_grad: Compute the first; None otherwise.
        weight_grad: Compute the second; None otherwise.
    """
    width = total.shape[-1]
    grad = total.new_empty(total.shape) if input_grad else None
    if total.numel() == 0:
        return grad, torch.zeros_like(weight) if weight_grad else None
    rows, grad_rows = _rows(total), _rows(grad_y)
    others = None if grad_total is None else _rows(grad_total)
    block_d = ceil_power_of_2(width)
    together = block_d <= tiles.MAX_FUSED_WIDTH

    def run(tile: RowTile) -> Tensor | None:
        overlaps = tile.overlap and dependent_launch(total.device)
        programs = ceil_divide(rows.shape[0], tile.rows)
        if together:
            programs = min(programs, tile.programs * processors(total.device))
        parts = _parts(programs, weight) if weight_grad and together else None
        launch_rows = _backward_launch(
            tile, programs, rows.shape[0], width, grad_rows.stride(0), 0 if others is None else others.stride(0),
            rows.stride(0), total.element_size(), _clamps(total.dtype, fused), overlaps and parts is not None,
        )  # fmt: skip
        launch_rows(grad_rows, others, rows, weight.contiguous(), rstd, grad, parts)
        return None if parts is None else _sum(parts, weight, overlaps)

    with on_device(total):
        grad_weight = None
        if input_grad or together:
            size = (block_d, total.element_size(), others is not None, input_grad, weight_grad)
            preferred = tiles.backward_tile(width, total.element_size(), 2 if others is None else 3)
            candidates = tiles.backward_candidates(preferred, block_d)
            grad_weight = launch("rms_norm backward", size, total.device, preferred, candidates, run)
        if weight_grad and not together:
            grad_weight = _wide_weight_gradient(grad_rows, rows, weight, rstd)
    return grad, grad_weight


@functools.lru_cache(LAUNCHES_KEPT)
def _backward_launch(
    tile: RowTile, programs: int, rows: int, width: int, grad_row: int, other_row: int, row: int, itemsize: int,
    clamps: bool, leads: bool,
) -> PreparedLaunch:  # fmt: skip
    block_d = ceil_power_of_2(width)
    return PreparedLaunch(
        backward_kernel, (programs,), dy_row=grad_row, dh_row=other_row, h_row=row, num_rows=rows, D=width,
        BLOCK_D=block_d, ROWS=tile.rows, COLUMNS=min(block_d, tiles.LANES_BYTES // itemsize), AHEAD=tile.stages > 1,
        UNROLL=tile.unroll, CLAMP=clamps, LEADS=leads, **tile.options(),
    )  # fmt: skip


def _wide_weight_gradient(grad_rows: Tensor, rows: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    tile, width = tiles.WEIGHT_TILE, len(weight)
    blocks = ceil_divide(width, tiles.WEIGHT_COLUMNS)
    most = max(1, tile.programs * processors(rows.device) // blocks)
    parts = _parts(min(ceil_divide(len(rows), tile.rows), most), weight)
    weight_kernel[(len(parts), blocks)](
        grad_rows, rows, rstd, parts, grad_rows.stride(0), rows.stride(0), len(rows), D=width,
        COLUMNS=tiles.WEIGHT_COLUMNS, ROWS=tile.rows, **tile.options(),
    )  # fmt: skip
    return _sum(parts, weight)


def _parts(programs: int, weight: Tensor) -> Tensor:
    return weight.new_empty(programs, weight.shape[0], dtype=torch.float32)


def _sum(parts: Tensor, weight: Tensor, follows: bool = False) -> Tensor:
    total = weight.new_empty(weight.shape)
    _sum_launch(*parts.shape, follows, weight.device)(parts, total)
    return total


@functools.lru_cache(LAUNCHES_KEPT)
def _sum_launch(parts: int, width: int, follows: bool, device: torch.device) -> PreparedLaunch:
    at_once = min(max(ceil_power_of_2(parts), tiles.MIN_SUM_PARTS), tiles.MAX_SUM_PARTS)
    return PreparedLaunch(
        sum_kernel, (ceil_divide(width, tiles.SUM_COLUMNS),), num_parts=parts, D=width, PARTS=at_once,
        COLUMNS=tiles.SUM_COLUMNS, FOLLOWS=follows, num_warps=tiles.SUM_WARPS,
        **(follower_options(device) if follows else {}),
    )  # fmt: skip


def _rows(x: Tensor) -> Tensor:
    """Return [rows, D] whose elements are neighbours, a view wherever one stride leads from row to row."""
    if x.is_contiguous():
        return x.view(-1, x.shape[-1])
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def _clamps(dtype: torch.dtype, fused: bool) -> bool:
    return fused and dtype == torch.float16
