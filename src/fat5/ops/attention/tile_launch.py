"""Launching one kernel: its grid, and a tile that fits the card."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton
from torch import Tensor

from fat5.ops.attention.autotune import autotuned_tile, autotuning
from fat5.ops.attention.document_tiles import document_tiles
from fat5.ops.attention.kernel_arguments import block_d, even_tiles
from fat5.ops.attention.problem import Problem
from fat5.ops.attention.tiles import Call, Tile, fallbacks, preferred_tile
from fat5.ops.prepared_launch import ceil_divide

_WHOLE_TILES = Tile(128, 128, 4, 1)  # lengths that any tile divides


@functools.cache
def _capability(device: torch.device) -> int:
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


_fitting: dict[tuple, Tile] = {}
_LAST_KEPT = 1024
_last: dict[tuple, Tile] = {}


def launch_fitting(
    kernel: str,
    problem: Problem,
    run: Callable[[Tile], Any],
    signature: Hashable | None = None,
    stores: bool = False,
) -> Tile:
    """Run with the table's tile, or the first smaller one that fits the card, and return it.

    Args:
        kernel: A name in `tiles.KERNELS`.
        problem: What to run on.
        run: Launches with a tile; may be called any number of times.
        signature: The problem's and all else that the arguments depend on, by which the tile is found again.
        stores: As in `tiles.Call`.
    """
    if signature is None:
        return _launch_fitting(kernel, problem, run, stores)
    tile = _last.get((kernel, signature))
    if tile is not None:
        run(tile)
        return tile
    if len(_last) >= _LAST_KEPT:
        _last.clear()
    tile = _last[kernel, signature] = _launch_fitting(kernel, problem, run, stores)
    return tile


def _launch_fitting(kernel: str, problem: Problem, run: Callable[[Tile], Any], stores: bool) -> Tile:
    device = problem.q.device
    call = Call(
        kernel=kernel,
        capability=_capability(device),
        block_d=block_d(problem),
        itemsize=problem.q.element_size(),
        causal=problem.causal,
        tails=not all(even_tiles(problem, _WHOLE_TILES)),
        dense=problem.bias_kind == "dense",
        stores=stores,
    )
    key = (call, device, problem.q.dtype, problem.bias_kind, problem.dropout_p > 0)
    if key in _fitting:
        run(_fitting[key])
        return _fitting[key]
    preferred = preferred_tile(call)
    if autotuning() and device.type == "cuda":
        preferred = autotuned_tile(call, preferred, run)
    for tile in fallbacks(preferred):
        try:
            run(tile)
        except triton.runtime.errors.OutOfResources:
            continue
        _fitting[key] = tile
        return tile
    raise RuntimeError(f"no tile of the {kernel} kernel fits {device} at head dimension {problem.head_dim}")


def grid_of(problem: Problem, length: int, block: int, tiles: Tensor | None) -> tuple[int, int]:
    """Return the grid over blocks of rows, or of a map of documents' tiles, and heads."""
    if tiles is not None:
        return tiles.shape[0], problem.heads
    return ceil_divide(length, block), problem.batch * problem.heads


def query_tiles(problem: Problem, block: int) -> Tensor | None:
    """Return the map of tiles of packed queries, or None."""
    if problem.cu_seqlens_q is None:
        return None
    return document_tiles(problem.cu_seqlens_q, problem.num_queries, block)
