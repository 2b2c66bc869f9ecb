"""Forward and backward of the `triton` backend: which kernels run on what, and in which order."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from fat5.ops.attention.backward import delta_kernel, key_value_kernel
from fat5.ops.attention.bias_gradient import band_kernel, dense_bias_kernel, table_kernel
from fat5.ops.attention.decode_launch import decode_signature, is_decoding, run_decode, split_count
from fat5.ops.attention.document_tiles import document_tiles
from fat5.ops.attention.forward import forward_kernel
from fat5.ops.attention.kernel_arguments import (
    any_bias_arguments,
    bias_place,
    bias_radius,
    bias_strides,
    block_d,
    common_arguments,
    even_tiles,
    float32_products,
    in_log2,
    readable,
    strides,
    unit_stride,
    without_tensors,
)
from fat5.ops.attention.problem import Gradients, Problem
from fat5.ops.attention.query_gradient import query_kernel
from fat5.ops.attention.side_stream import SideStream
from fat5.ops.attention.tile_launch import grid_of, launch_fitting, query_tiles
from fat5.ops.attention.tiles import Tile
from fat5.ops.dependent_launch import dependent_launch, follower_options
from fat5.ops.launching import on_device, processors
from fat5.ops.prepared_launch import PreparedLaunch, PreparedLaunches, Relaunched, ceil_divide, ceil_power_of_2

delta_kernel, key_value_kernel, query_kernel, band_kernel, table_kernel, dense_bias_kernel = map(
    Relaunched, (delta_kernel, key_value_kernel, query_kernel, band_kernel, table_kernel, dense_bias_kernel)
)
_forward_launches = PreparedLaunches()
_BAND_PROGRAMS = 2  # programs of the band kernel a multiprocessor


def run_forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return the output, shaped as q, and the log2-sum-exp of the scores; see `custom_ops.define_ops`."""
    problem = readable(problem)
    out = torch.empty_like(problem.q, memory_format=torch.contiguous_format)
    lse = problem.q.new_empty(problem.lse_shape, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse.fill_(torch.inf)
    few = is_decoding(problem)
    known = decode_signature(problem) if few else problem.signature, float32_products()

    def decode(tile: Tile) -> None:
        run_decode(problem, tile, out, lse, split_count(problem, processors(out.device)), known)

    def run(tile: Tile) -> None:
        tiles = query_tiles(problem, tile.queries)
        launch = _forward_launches.get((known, tile), lambda: _prepare_forward(problem, tile, out, tiles))
        launch(
            problem.q, problem.k, problem.v, out, lse, problem.bias, tiles, problem.cu_seqlens_q, problem.cu_seqlens_k,
            problem.key_starts, problem.key_lengths, problem.offsets, problem.seed if problem.dropout_p > 0 else None,
        )  # fmt: skip

    with on_device(out):
        if few:
            launch_fitting("decode", problem, decode, known)
        else:
            launch_fitting("forward", problem, run, known)
    return out, lse


def _prepare_forward(problem: Problem, tile: Tile, out: Tensor, tiles: Tensor | None) -> PreparedLaunch:
    even_m, even_n = even_tiles(problem, tile)
    return PreparedLaunch(
        forward_kernel, grid_of(problem, problem.num_queries, tile.queries, tiles), BM=tile.queries, BN=tile.keys,
        EVEN_M=even_m, EVEN_N=even_n, PDL=dependent_launch(out.device), **follower_options(out.device),
        **bias_place(problem, tile), **tile.options(), **strides("o", out),
        **without_tensors(common_arguments(problem)), **without_tensors(any_bias_arguments(problem)),
    )  # fmt: skip


def run_backward(
    problem: Problem, grad_out: Tensor, out: Tensor, lse: Tensor, bias_grad: bool, gradients: Gradients
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Write the gradients of q, k and v, and return them and, if asked for, that of the bias in its type."""
    bias_dtype = None if problem.bias is None else problem.bias.dtype
    softmax_scale = problem.softmax_scale
    problem, grad_out = readable(problem), unit_stride(grad_out)
    table = problem.bias if problem.bias_kind == "distance" else None
    problem = in_log2(problem)
    grad_q, grad_k, grad_v = gradients
    if problem.q.numel() == 0 or problem.k.numel() == 0:
        zeros = torch.zeros_like(problem.bias) if problem.bias is not None and bias_grad else None
        return grad_q.zero_(), grad_k.zero_(), grad_v.zero_(), zeros
    with on_device(out):
        stats = _run_delta(problem, out, grad_out, lse, table)
        arguments = common_arguments(problem) | {"DO": grad_out, "Stats": stats, **strides("do", grad_out)}
        any_bias = any_bias_arguments(problem) | {"softmax_scale": softmax_scale}
        grad_bias = _whole_bias_grad(problem) if bias_grad else None
        band = None
        with SideStream(out.device) as side:
            sums, tile = _run_queries(problem, arguments | any_bias, grad_q, bias_grad, grad_bias, side)
            _run_keys(problem, arguments | any_bias, grad_k, grad_v)
            if bias_grad and problem.bias is not None and problem.bias_kind == "dense" and grad_bias is None:
                grad_bias = _run_dense_bias(problem, problem.bias, arguments)
            elif bias_grad and table is not None:
                band = _run_band(problem, arguments, tile)
        if sums is not None:
            grad_bias = sums[..., 0].sum(1) if band is None else _run_table(problem, band, sums)
            grad_bias = grad_bias.to(bias_dtype)
    return grad_q, grad_k, grad_v, grad_bias


def _run_delta(problem: Problem, out: Tensor, grad_out: Tensor, lse: Tensor, table: Tensor | None) -> Tensor:
    """Return LSE and delta of each row, side by side, and fill the problem's table with `table` in units of log2."""
    radius = bias_radius(problem)
    stats = torch.empty(*problem.lse_shape, 2, dtype=torch.float32, device=out.device)
    block = 32
    delta_kernel[(ceil_divide(problem.num_queries, block), problem.batch * problem.heads)](
        O=out, DO=grad_out, LSE=lse, Stats=stats, **strides("o", out), **strides("do", grad_out),
        heads=problem.heads, num_rows=problem.num_queries,
        Table=table, Log2Table=None if table is None else problem.bias,
        BM=block, D=problem.head_dim, BLOCK_D=block_d(problem),
        RADIUS=radius, WIDTH=ceil_power_of_2(2 * radius + 1),
    )  # fmt: skip
    return stats


def _run_keys(problem: Problem, arguments: dict[str, Any], grad_k: Tensor, grad_v: Tensor) -> None:
    def run(tile: Tile) -> None:
        tiles = None
        if problem.cu_seqlens_k is not None:
            tiles = document_tiles(problem.cu_seqlens_k, problem.num_keys, tile.keys)
        even_m, even_n = even_tiles(problem, tile)
        key_value_kernel[grid_of(problem, problem.num_keys, tile.keys, tiles)](
            DK=grad_k, DV=grad_v, Tiles=tiles, **strides("dk", grad_k), BM=tile.queries, BN=tile.keys,
            EVEN_M=even_m, EVEN_N=even_n, PAIRED_STATS=2 * tile.queries >= 32 * tile.warps,
            **bias_place(problem, tile), **tile.options(), **arguments,
        )  # fmt: skip

    launch_fitting("key_value", problem, run)


def _paired(problem: Problem, even_n: bool) -> bool:
    """Whether a dense bias can be read two elements at once: 16 bits each, in pairs that no edge or row splits."""
    bias = problem.bias
    if bias is None or problem.bias_kind != "dense" or bias.element_size() != 2 or not even_n:
        return False
    return bias.data_ptr() % 4 == 0 and all(stride % 2 == 0 for stride in bias.stride()[:3])


def _whole_bias_grad(problem: Problem) -> Tensor | None:
    """Return room for the gradient of a dense bias that broadcasts nothing, which the query kernel fills; else None.

    It starts at 0 where that kernel skips hidden tiles.
    """
    whole = (problem.batch, problem.heads, problem.num_queries, problem.num_keys)
    if problem.bias is None or problem.bias_kind != "dense" or tuple(problem.bias.shape) != whole:
        return None
    skips = problem.causal or problem.key_starts is not None or problem.key_lengths is not None
    return (torch.zeros if skips else torch.empty)(whole, dtype=problem.bias.dtype, device=problem.bias.device)


def _run_queries(
    problem: Problem,
    arguments: dict[str, Any],
    grad_q: Tensor,
    bias_grad: bool,
    grad_bias: Tensor | None,
    side: SideStream,
) -> tuple[Tensor | None, Tile]:
    """Fill the gradient of q, and return the sums of dS that go to the bias, [H, programs a head, 2], and the tile.

    Also fill `grad_bias`, the gradient of a dense bias that broadcasts nothing.
    """
    db_batch, db_head, db_row = bias_strides(grad_bias)
    needs_sums = bias_grad and problem.bias_kind not in ("none", "dense")
    sums: Tensor | None = None

    def run(tile: Tile) -> None:
        nonlocal sums
        if grad_bias is not None and not tile.settled:  # the assembler serialises products around the store of dS
            tile = dataclasses.replace(tile, stages=1)
        tiles = query_tiles(problem, tile.queries)
        even_m, even_n = even_tiles(problem, tile)
        grid = grid_of(problem, problem.num_queries, tile.queries, tiles)
        if needs_sums:
            slots = grid[0] * problem.batch
            sums = torch.empty(problem.heads, slots, 2, dtype=torch.float32, device=grad_q.device)
        with side.launches(tiles, sums):
            query_kernel[grid](
                DQ=grad_q, Sums=sums, Tiles=tiles, **strides("dq", grad_q), BM=tile.queries, BN=tile.keys,
                EVEN_M=even_m, EVEN_N=even_n, BIAS_GRAD=needs_sums, DBias=grad_bias, db_batch=db_batch,
                db_head=db_head, db_row=db_row, STORE_BIAS_GRAD=grad_bias is not None,
                PAIRED=_paired(problem, even_n), **bias_place(problem, tile), **tile.options(),
                **arguments,
            )  # fmt: skip

    tile = launch_fitting("query", problem, run, stores=grad_bias is not None)
    return sums, tile


def _run_band(problem: Problem, arguments: dict[str, Any], query_tile: Tile) -> tuple[Tensor, int, int]:
    """Return the sums of dS over the near tiles' diagonals, their tiles' side, and the first tile's place."""
    side, radius, heads, device = query_tile.keys, bias_radius(problem), problem.heads, problem.q.device
    first_near = -((radius + side - 2) // side)
    last_near = (radius + query_tile.queries - 2) // side
    ratio = query_tile.queries // side
    first_tile = first_near - (ratio - 1)
    last_tile = min(last_near, 0) if problem.causal else last_near
    num_tiles = last_tile - first_tile + 1
    tiles = query_tiles(problem, side)
    blocks = ceil_divide(problem.num_queries, side)
    items = tiles.shape[0] if tiles is not None else problem.batch * blocks
    shares = max(1, min(items, _BAND_PROGRAMS * processors(device) // (num_tiles * heads)))
    even_m, even_n = even_tiles(problem, Tile(side, side, 1, 1))
    parts = torch.empty(shares, heads, num_tiles, 2 * side, dtype=torch.float32, device=device)

    def run(tile: Tile) -> None:
        band_kernel[(num_tiles, shares, heads)](
            Bias=problem.bias, Parts=parts, Tiles=tiles, CuQ=problem.cu_seqlens_q, CuK=problem.cu_seqlens_k,
            num_items=items, blocks_a_sequence=blocks, first_tile=first_tile, first_near=first_near,
            last_near=last_near, BM=side, RATIO=ratio, RADIUS=radius, VARLEN=problem.packed,
            EVEN_M=even_m, EVEN_N=even_n,
            **tile.options(), **arguments,
        )  # fmt: skip

    launch_fitting("band", problem, run)
    return parts, side, first_tile


def _run_table(problem: Problem, band: tuple[Tensor, int, int], sums: Tensor) -> Tensor:
    """Return the gradient [H, 2R + 1] of a table by distance from the band's sums and those of the far tiles."""
    parts, side, first_tile = band
    shares, heads, num_tiles, _ = parts.shape
    radius = bias_radius(problem)
    grad = torch.empty(heads, 2 * radius + 1, dtype=torch.float32, device=parts.device)
    first_distance = (first_tile - 1) * side
    width = ceil_power_of_2(max((num_tiles + 1) * side, radius - first_distance))
    table_kernel[(heads,)](
        parts, sums, grad, sums.shape[1], num_tiles, first_distance, shares,
        BM=side, RADIUS=radius, WIDTH=width, CHUNK=1024, PDL=dependent_launch(grad.device),
    )  # fmt: skip
    return grad


def _run_dense_bias(problem: Problem, bias: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Return the gradient of a dense bias, in its shape and type."""
    grad = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    bias_batch, bias_head, bias_row = bias_strides(bias)
    db_batch, db_head, db_row = bias_strides(grad)
    broadcast_rows = bias.shape[2] == 1

    def run(tile: Tile) -> None:
        blocks = ceil_divide(problem.num_queries, tile.queries)
        columns = ceil_divide(problem.num_keys, tile.keys)
        even_m, even_n = even_tiles(problem, tile)
        dense_bias_kernel[(columns, 1 if broadcast_rows else blocks, bias.shape[0] * bias.shape[1])](
            Bias=bias, DBias=grad, bias_batch=bias_batch, bias_head=bias_head, bias_row=bias_row,
            db_batch=db_batch, db_head=db_head, db_row=db_row,
            sum_batches=problem.batch // bias.shape[0], sum_heads=problem.heads // bias.shape[1],
            sum_blocks=blocks if broadcast_rows else 1, BM=tile.queries, BN=tile.keys, SUM_ROWS=broadcast_rows,
            EVEN_M=even_m, EVEN_N=even_n, **tile.options(), **arguments,
        )  # fmt: skip

    launch_fitting("dense_bias", problem, run)
    return grad
