"""Launching the fused kernel."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fat5.ops.feed_forward.descriptors import Tiles, describable
from fat5.ops.feed_forward.kernels import forward_kernel
from fat5.ops.feed_forward.tiles import TILE, ProductTile, candidates
from fat5.ops.launching import launch, on_device, processors
from fat5.ops.prepared_launch import LAUNCHES_KEPT, PreparedLaunch, ceil_divide


def run_forward(
    x: Tensor, weight: Tensor, tanh: bool, keep: bool, tile: ProductTile | None = None
) -> tuple[Tensor | None, Tensor]:
    """Return the joined projection `linear(x, weight)`, if it is to be kept, and the gated GELU of it.

    Args:
        x: [..., E].
        weight: [2 D, E], the gate's rows in front. The tile's columns divide D, and 8 divides E.
        tanh: For the approximation.
        keep: Whether to return the projection.
        tile: Instead of the table's.

    Returns:
        [..., 2 D] or None, and [..., D], contiguous.
    """
    width, depth = weight.shape[0] // 2, weight.shape[1]
    joined = x.new_empty((*x.shape[:-1], 2 * width)) if keep else None
    out = x.new_empty((*x.shape[:-1], width))
    if out.numel() == 0:
        return joined, out
    x, weight = describable(x.reshape(-1, depth)), describable(weight)
    rows = x.shape[0]

    def run(tile: ProductTile) -> None:
        _launch(tile, rows, width, depth, tanh, x.device)(
            Tiles(x, (rows, depth), (tile.rows, tile.depth)),
            Tiles(weight, (2, width, depth), (2, tile.columns, tile.depth)),
            None if joined is None else Tiles(joined, (rows, 2 * width), (tile.rows, tile.columns)),
            Tiles(out, (rows, width), (tile.rows, tile.columns)),
        )

    with on_device(x):
        if tile is None:
            size = (x.element_size(), tanh, width, depth, keep)
            fitting = (other for other in candidates() if width % other.columns == 0)
            launch("gated_feed_forward", size, x.device, TILE, fitting, run)
        else:
            run(tile)
    return joined, out


@functools.lru_cache(LAUNCHES_KEPT)
def _launch(tile: ProductTile, rows: int, width: int, depth: int, tanh: bool, device: torch.device) -> PreparedLaunch:
    programs = min(ceil_divide(rows, tile.rows) * (width // tile.columns), tile.resident * processors(device))
    return PreparedLaunch(
        forward_kernel, (programs,), rows=rows, width=width, depth=depth, programs=programs, TANH=tanh, BM=tile.rows,
        BN=tile.columns, BK=tile.depth, GROUP=tile.group, **tile.options(),
    )  # fmt: skip
