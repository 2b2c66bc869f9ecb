"""Launching the norm's kernels: rows, grids, allocation."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fat5.ops.dependent_launch import dependent_launch, follower_options
from fat5.ops.launching import launch, on_device, processors
from fat5.ops.norm import tiles
from fat5.ops.norm.kernels import backward_kernel, forward_kernel, sum_kernel, weight_kernel
from fat5.ops.norm.tiles import RowTile


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
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    total = x if residual is None else torch.empty_like(y)
    rstd = torch.empty(x.numel() // width, dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return y, total, rstd
    rows, other = _rows(x), None if residual is None else _rows(residual)
    block_d = triton.next_power_of_2(width)

    def run(tile: RowTile) -> None:
        forward_kernel[(triton.cdiv(len(rows), tile.rows),)](
            rows, other, weight.contiguous(), y, total, rstd, rows.stride(0), 0 if other is None else other.stride(0),
            len(rows), eps, D=width, BLOCK_D=block_d, ROWS=tile.rows, CLAMP=_clamps(dtype, residual is not None),
            **tile.options(),
        )  # fmt: skip

    with on_device(x):
        size = (block_d, x.element_size(), residual is not None)
        launch("rms_norm forward", size, x.device, tiles.forward_tile(block_d), tiles.forward_candidates(block_d), run)
    return y, total, rstd


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
    grad = torch.empty(total.shape, dtype=total.dtype, device=total.device) if input_grad else None
    if total.numel() == 0:
        return grad, torch.zeros_like(weight) if weight_grad else None
    rows, grad_rows = _rows(total), _rows(grad_y)
    others = None if grad_total is None else _rows(grad_total)
    block_d = triton.next_power_of_2(width)
    together = block_d <= tiles.MAX_FUSED_WIDTH

    def run(tile: RowTile) -> Tensor | None:
        overlaps = tile.overlap and dependent_launch(total.device)
        programs = min(triton.cdiv(len(rows), tile.rows), tile.programs * processors(total.device))
        parts = _parts(programs, weight) if weight_grad and together else None
        if not together:
            programs = triton.cdiv(len(rows), tile.rows)
        backward_kernel[(programs,)](
            grad_rows, others, rows, weight.contiguous(), rstd, grad, parts, grad_rows.stride(0),
            0 if others is None else others.stride(0), rows.stride(0), len(rows), D=width, BLOCK_D=block_d,
            ROWS=tile.rows, COLUMNS=min(block_d, tiles.LANES_BYTES // total.element_size()), AHEAD=tile.stages > 1,
            UNROLL=tile.unroll, CLAMP=_clamps(total.dtype, fused), LEADS=overlaps and parts is not None,
            **tile.options(),
        )  # fmt: skip
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


def _wide_weight_gradient(grad_rows: Tensor, rows: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    tile, width = tiles.WEIGHT_TILE, len(weight)
    blocks = triton.cdiv(width, tiles.WEIGHT_COLUMNS)
    most = max(1, tile.programs * processors(rows.device) // blocks)
    parts = _parts(min(triton.cdiv(len(rows), tile.rows), most), weight)
    weight_kernel[(len(parts), blocks)](
        grad_rows, rows, rstd, parts, grad_rows.stride(0), rows.stride(0), len(rows), D=width,
        COLUMNS=tiles.WEIGHT_COLUMNS, ROWS=tile.rows, **tile.options(),
    )  # fmt: skip
    return _sum(parts, weight)


def _parts(programs: int, weight: Tensor) -> Tensor:
    return torch.empty(programs, len(weight), dtype=torch.float32, device=weight.device)


def _sum(parts: Tensor, weight: Tensor, follows: bool = False) -> Tensor:
    total = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    at_once = min(max(triton.next_power_of_2(len(parts)), tiles.MIN_SUM_PARTS), tiles.MAX_SUM_PARTS)
    sum_kernel[(triton.cdiv(len(weight), tiles.SUM_COLUMNS),)](
        parts, total, len(parts), D=len(weight), PARTS=at_once, COLUMNS=tiles.SUM_COLUMNS, FOLLOWS=follows,
        num_warps=tiles.SUM_WARPS, **(follower_options(weight.device) if follows else {}),
    )  # fmt: skip
    return total


def _rows(x: Tensor) -> Tensor:
    """Return [rows, D] whose elements are neighbours, a view wherever one stride leads from row to row."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def _clamps(dtype: torch.dtype, fused: bool) -> bool:
    return fused and dtype == torch.float16
