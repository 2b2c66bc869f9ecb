"""Launching the kernels: strides, grids, allocation, and tiles that fit the card."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

from fat5.ops.attention import tile_scores as scores
from fat5.ops.attention.autotune import autotuned_tile, autotuning
from fat5.ops.attention.backward import delta_kernel, key_value_kernel
from fat5.ops.attention.bias_gradient import band_kernel, dense_bias_kernel, table_kernel
from fat5.ops.attention.decode_launch import is_decoding, run_decode, split_count
from fat5.ops.attention.document_tiles import document_tiles
from fat5.ops.attention.forward import forward_kernel
from fat5.ops.attention.problem import Problem
from fat5.ops.attention.query_gradient import query_kernel
from fat5.ops.attention.tiles import Call, Tile, fallbacks, preferred_tile

_BIAS_KINDS = {
    "none": scores.NO_BIAS.value,
    "distance": scores.DISTANCE.value,
    "alibi": scores.ALIBI.value,
    "alibi-signed": scores.ALIBI_SIGNED.value,
    "dense": scores.DENSE.value,
}
_LOG2E = 1.4426950408889634
_WHOLE_TILES = Tile(128, 128, 4, 1)  # lengths that any tile divides
_BAND_PROGRAMS = 2  # programs of the band kernel a multiprocessor


def _block_d(problem: Problem) -> int:
    return max(16, triton.next_power_of_2(problem.head_dim))


def _radius(problem: Problem) -> int:
    return problem.bias.shape[1] // 2 if problem.bias is not None and problem.bias_kind == "distance" else 0


def _even(problem: Problem, tile: Tile) -> tuple[bool, bool]:
    """Whether queries and keys fill their tiles without tails, hidden keys, or distances off the tiles' grid."""
    if problem.packed:
        return False, False
    bounded = problem.key_starts is not None or problem.key_lengths is not None or problem.offsets is not None
    aligned = problem.num_keys % tile.keys == 0 and (problem.offset or 0) % tile.keys == 0
    return problem.num_queries % tile.queries == 0, aligned and not bounded


def _common(problem: Problem) -> dict[str, Any]:
    """Return the arguments that all kernels share: tensors, strides, geometry, and constants."""
    offset = scores.SHARED_OFFSET
    if problem.offsets is not None:
        offset = scores.OWN_OFFSET
    elif problem.offset is None:
        offset = scores.END_OFFSET
    return {
        "Q": problem.q,
        "K": problem.k,
        "V": problem.v,
        **_strides("q", problem.q),
        **_strides("k", problem.k),
        **_strides("v", problem.v),
        "KeyStarts": problem.key_starts,
        "KeyLengths": problem.key_lengths,
        "Offsets": problem.offsets,
        "Seed": problem.seed if problem.dropout_p > 0 else None,
        "scale": problem.softmax_scale,
        "offset": problem.offset or 0,
        "threshold": int(problem.dropout_p * 2**32),
        "keep_scale": 1 / (1 - problem.dropout_p),
        "H": problem.heads,
        "M": problem.num_queries,
        "N": problem.num_keys,
        "D": problem.head_dim,
        "BLOCK_D": _block_d(problem),
        "CAUSAL": problem.causal,
        "OFFSET": offset.value,
        "HAS_STARTS": problem.key_starts is not None,
        "HAS_LENGTHS": problem.key_lengths is not None,
        "DROPOUT": problem.dropout_p > 0,
        # Full float32 products, unless the user lets PyTorch's own be TF32.
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
    }


def _in_log2(problem: Problem) -> Problem:
    """Return the problem with scale, table and slopes in units of log2, as the backward kernels read them."""
    bias = problem.bias if problem.bias is None or problem.bias_kind == "dense" else problem.bias * _LOG2E
    return dataclasses.replace(problem, bias=bias, softmax_scale=problem.softmax_scale * _LOG2E)


def _any_bias(problem: Problem) -> dict[str, Any]:
    """Return what the kernels that take any bias, and documents, need besides."""
    batch, head, row = _bias_strides(problem.bias) if problem.bias_kind == "dense" else (0, 0, 0)
    return {
        "Bias": problem.bias,
        "bias_batch": batch,
        "bias_head": head,
        "bias_row": row,
        "CuQ": problem.cu_seqlens_q,
        "CuK": problem.cu_seqlens_k,
        "BIAS": _BIAS_KINDS[problem.bias_kind],
        "RADIUS": _radius(problem),
        "VARLEN": problem.packed,
        "ASM": problem.q.is_cuda and not triton.knobs.runtime.interpret and torch.version.hip is None,
    }


def _bias_strides(bias: Tensor | None) -> tuple[int, int, int]:
    """Return the strides of a dense bias over batch, head and query; 0 where it is broadcast."""
    if bias is None:
        return 0, 0, 0
    batch, head, row = (0 if n == 1 else s for n, s in zip(bias.shape[:3], bias.stride()[:3], strict=True))
    return batch, head, row


def _strides(name: str, x: Tensor) -> dict[str, int]:
    batch = x.stride(0) if x.ndim == 4 else 0
    return {f"{name}_batch": batch, f"{name}_row": x.stride(-3), f"{name}_head": x.stride(-2)}


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


@functools.cache
def _capability(device: torch.device) -> int:
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


_fitting: dict[tuple, Tile] = {}


def _launch(kernel: str, problem: Problem, run: Callable[[Tile], Any]) -> Tile:
    """Run with the table's tile, or the first smaller one that fits the card, and return it."""
    device = problem.q.device
    call = Call(
        kernel=kernel,
        capability=_capability(device),
        block_d=_block_d(problem),
        itemsize=problem.q.element_size(),
        causal=problem.causal,
        tails=not all(_even(problem, _WHOLE_TILES)),
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


def _on_device(x: Tensor) -> Any:
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


def _grid(problem: Problem, length: int, block: int, tiles: Tensor | None) -> tuple[int, int]:
    if tiles is not None:
        return tiles.shape[0], problem.heads
    return triton.cdiv(length, block), problem.batch * problem.heads


def _query_tiles(problem: Problem, block: int) -> Tensor | None:
    if problem.cu_seqlens_q is None:
        return None
    return document_tiles(problem.cu_seqlens_q, problem.num_queries, block)


def _readable(problem: Problem) -> Problem:
    """Return the problem with rows whose elements are neighbours, copied only where they are not."""
    bias = problem.bias
    if bias is not None:
        bias = _unit_stride(bias) if problem.bias_kind == "dense" else bias.float().contiguous()
    q, k, v = (_unit_stride(x) for x in (problem.q, problem.k, problem.v))
    return dataclasses.replace(problem, q=q, k=k, v=v, bias=bias)


def run_forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return the output, shaped as q, and the log2-sum-exp of the scores; see `custom_ops.define_ops`."""
    problem = _readable(problem)
    out = torch.empty(problem.q.shape, dtype=problem.q.dtype, device=problem.q.device)
    lse = torch.empty(problem.lse_shape, dtype=torch.float32, device=problem.q.device)
    if out.numel() == 0:
        return out, lse.fill_(torch.inf)
    arguments = {"O": out, "LSE": lse, **_strides("o", out), **_common(problem)}
    arguments |= _any_bias(problem)

    def decode(tile: Tile) -> None:
        run_decode(problem, tile, arguments, split_count(problem, _processors(out.device)))

    def run(tile: Tile) -> None:
        tiles = _query_tiles(problem, tile.queries)
        even_m, even_n = _even(problem, tile)
        forward_kernel[_grid(problem, problem.num_queries, tile.queries, tiles)](
            Tiles=tiles, BM=tile.queries, BN=tile.keys,
            EVEN_M=even_m, EVEN_N=even_n,
            **tile.options(), **arguments,
        )  # fmt: skip

    with _on_device(out):
        if is_decoding(problem):
            _launch("decode", problem, decode)
        else:
            _launch("forward", problem, run)
    return out, lse


def run_backward(
    problem: Problem, grad_out: Tensor, out: Tensor, lse: Tensor, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and, if asked for, of the bias in its type."""
    bias_dtype = None if problem.bias is None else problem.bias.dtype
    softmax_scale = problem.softmax_scale
    problem, grad_out = _in_log2(_readable(problem)), _unit_stride(grad_out)
    grad_q, grad_k, grad_v = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (problem.q, problem.k, problem.v)
    )
    if problem.q.numel() == 0 or problem.k.numel() == 0:
        zeros = torch.zeros_like(problem.bias) if problem.bias is not None and bias_grad else None
        return grad_q.zero_(), grad_k.zero_(), grad_v.zero_(), zeros
    with _on_device(out):
        arguments = _common(problem) | {"DO": grad_out, "LSE": lse, "Delta": _run_delta(problem, out, grad_out)}
        arguments |= _strides("do", grad_out)
        any_bias = _any_bias(problem) | {"softmax_scale": softmax_scale}
        _run_keys(problem, arguments | any_bias, grad_k, grad_v)
        grad_bias = _whole_bias_grad(problem) if bias_grad else None
        sums, tile = _run_queries(problem, arguments | any_bias, grad_q, bias_grad, grad_bias)
        if problem.bias is not None and bias_grad and problem.bias_kind == "dense":
            grad_bias = _run_dense_bias(problem, problem.bias, arguments) if grad_bias is None else grad_bias
        elif problem.bias is not None and sums is not None:
            table = problem.bias_kind == "distance"
            grad_bias = _run_table(problem, arguments, sums, tile) if table else sums[..., 0].sum(1)
            grad_bias = grad_bias.to(bias_dtype)
    return grad_q, grad_k, grad_v, grad_bias


def _run_delta(problem: Problem, out: Tensor, grad_out: Tensor) -> Tensor:
    delta = torch.empty(problem.lse_shape, dtype=torch.float32, device=out.device)
    block = 32
    delta_kernel[(triton.cdiv(problem.num_queries, block), problem.batch * problem.heads)](
        O=out, DO=grad_out, Delta=delta, **_strides("o", out), **_strides("do", grad_out),
        H=problem.heads, M=problem.num_queries, BM=block, D=problem.head_dim, BLOCK_D=_block_d(problem),
    )  # fmt: skip
    return delta


def _run_keys(problem: Problem, arguments: dict[str, Any], grad_k: Tensor, grad_v: Tensor) -> None:
    def run(tile: Tile) -> None:
        tiles = None
        if problem.cu_seqlens_k is not None:
            tiles = document_tiles(problem.cu_seqlens_k, problem.num_keys, tile.keys)
        even_m, even_n = _even(problem, tile)
        key_value_kernel[_grid(problem, problem.num_keys, tile.keys, tiles)](
            DK=grad_k, DV=grad_v, Tiles=tiles, **_strides("dk", grad_k), BM=tile.queries, BN=tile.keys,
            EVEN_M=even_m, EVEN_N=even_n, **tile.options(), **arguments,
        )  # fmt: skip

    _launch("key_value", problem, run)


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
    problem: Problem, arguments: dict[str, Any], grad_q: Tensor, bias_grad: bool, grad_bias: Tensor | None
) -> tuple[Tensor | None, Tile]:
    """Fill the gradient of q, and return the sums of dS that go to the bias, [H, programs a head, 2], and the tile.

    Also fill `grad_bias`, the gradient of a dense bias that broadcasts nothing.
    """
    db_batch, db_head, db_row = _bias_strides(grad_bias)
    needs_sums = bias_grad and problem.bias_kind not in ("none", "dense")
    sums: Tensor | None = None

    def run(tile: Tile) -> None:
        nonlocal sums
        if grad_bias is not None:  # the assembler serialises pipelined products around the store of dS
            tile = dataclasses.replace(tile, stages=1)
        tiles = _query_tiles(problem, tile.queries)
        even_m, even_n = _even(problem, tile)
        grid = _grid(problem, problem.num_queries, tile.queries, tiles)
        if needs_sums:
            slots = grid[0] * problem.batch
            sums = torch.empty(problem.heads, slots, 2, dtype=torch.float32, device=grad_q.device)
        query_kernel[grid](
            DQ=grad_q, Sums=sums, Tiles=tiles, **_strides("dq", grad_q), BM=tile.queries, BN=tile.keys,
            EVEN_M=even_m, EVEN_N=even_n, BIAS_GRAD=needs_sums, DBias=grad_bias, db_batch=db_batch,
            db_head=db_head, db_row=db_row, STORE_BIAS_GRAD=grad_bias is not None,
            PAIRED=_paired(problem, even_n), **tile.options(),
            **arguments,
        )  # fmt: skip

    tile = _launch("query", problem, run)
    return sums, tile


def _run_table(problem: Problem, arguments: dict[str, Any], sums: Tensor, query_tile: Tile) -> Tensor:
    """Return the gradient [H, 2R + 1] of a table by distance; `sums` are those of the far tiles."""
    side, radius, heads, device = query_tile.keys, _radius(problem), problem.heads, problem.q.device
    first_near = -((radius + side - 2) // side)
    last_near = (radius + query_tile.queries - 2) // side
    ratio = query_tile.queries // side
    first_tile = first_near - (ratio - 1)
    last_tile = min(last_near, 0) if problem.causal else last_near
    num_tiles = last_tile - first_tile + 1
    tiles = _query_tiles(problem, side)
    blocks = triton.cdiv(problem.num_queries, side)
    items = tiles.shape[0] if tiles is not None else problem.batch * blocks
    shares = max(1, min(items, _BAND_PROGRAMS * _processors(device) // (num_tiles * heads)))
    even_m, even_n = _even(problem, Tile(side, side, 1, 1))
    parts = torch.empty(shares, heads, num_tiles, 2 * side, dtype=torch.float32, device=device)

    def run(tile: Tile) -> None:
        band_kernel[(num_tiles, shares, heads)](
            Bias=problem.bias, Parts=parts, Tiles=tiles, CuQ=problem.cu_seqlens_q, CuK=problem.cu_seqlens_k,
            num_items=items, blocks_a_sequence=blocks, first_tile=first_tile, first_near=first_near,
            last_near=last_near, BM=side, RATIO=ratio, RADIUS=radius, VARLEN=problem.packed,
            EVEN_M=even_m, EVEN_N=even_n,
            **tile.options(), **arguments,
        )  # fmt: skip

    _launch("band", problem, run)
    grad = torch.empty(heads, 2 * radius + 1, dtype=torch.float32, device=device)
    first_distance = (first_tile - 1) * side
    width = triton.next_power_of_2(max((num_tiles + 1) * side, radius - first_distance))
    table_kernel[(heads,)](
        parts, sums, grad, sums.shape[1], num_tiles, first_distance, shares,
        BM=side, RADIUS=radius, WIDTH=width, CHUNK=1024,
    )  # fmt: skip
    return grad


def _run_dense_bias(problem: Problem, bias: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Return the gradient of a dense bias, in its shape and type."""
    grad = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    bias_batch, bias_head, bias_row = _bias_strides(bias)
    db_batch, db_head, db_row = _bias_strides(grad)
    broadcast_rows = bias.shape[2] == 1

    def run(tile: Tile) -> None:
        blocks = triton.cdiv(problem.num_queries, tile.queries)
        columns = triton.cdiv(problem.num_keys, tile.keys)
        dense_bias_kernel[(columns, 1 if broadcast_rows else blocks, bias.shape[0] * bias.shape[1])](
            Bias=bias, DBias=grad, bias_batch=bias_batch, bias_head=bias_head, bias_row=bias_row,
            db_batch=db_batch, db_head=db_head, db_row=db_row,
            sum_batches=problem.batch // bias.shape[0], sum_heads=problem.heads // bias.shape[1],
            sum_blocks=blocks if broadcast_rows else 1, BM=tile.queries, BN=tile.keys, SUM_ROWS=broadcast_rows,
            **tile.options(), **arguments,
        )  # fmt: skip

    _launch("dense_bias", problem, run)
    return grad
