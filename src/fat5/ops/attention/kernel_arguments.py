"""What the kernels are given: tensors, strides, geometry and constants of one problem."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
from torch import Tensor

from fat5.ops.attention import tile_scores as scores
from fat5.ops.attention.problem import Problem
from fat5.ops.attention.tiles import Tile
from fat5.ops.prepared_launch import ceil_power_of_2

_BIAS_KINDS = {
    "none": scores.NO_BIAS.value,
    "distance": scores.DISTANCE.value,
    "alibi": scores.ALIBI.value,
    "alibi-signed": scores.ALIBI_SIGNED.value,
    "dense": scores.DENSE.value,
}
_BIAS_PLACES = {
    "after": scores.AFTER.value,
    "before": scores.BEFORE.value,
    "start": scores.START.value,
    "turned": scores.TURNED.value,
}
_LEAST_DIVISOR = 2.0**-32
_LOG2E = 1.4426950408889634


def float32_products() -> str:
    """Return how a kernel multiplies float32: "ieee", or "tf32" where the user lets PyTorch's own products be that.

    Read by the newer name, which knows what was set by either; the older one, `allow_tf32`, raises once that was used.
    """
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def block_d(problem: Problem) -> int:
    """Return the head dimension, padded to a power of two."""
    return max(16, ceil_power_of_2(problem.head_dim))


def bias_radius(problem: Problem) -> int:
    """Return the distance from which the table is constant; 0 without a table."""
    return problem.bias.shape[1] // 2 if problem.bias is not None and problem.bias_kind == "distance" else 0


def even_tiles(problem: Problem, tile: Tile) -> tuple[bool, bool]:
    """Whether queries and keys fill their tiles without tails, hidden keys, or distances off the tiles' grid."""
    if problem.packed:
        return False, False
    bounded = problem.key_starts is not None or problem.key_lengths is not None or problem.offsets is not None
    aligned = problem.num_keys % tile.keys == 0 and (problem.offset or 0) % tile.keys == 0
    return problem.num_queries % tile.queries == 0, aligned and not bounded


def common_arguments(problem: Problem) -> dict[str, Any]:
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
        **strides("q", problem.q),
        **strides("k", problem.k),
        **strides("v", problem.v),
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
        "BLOCK_D": block_d(problem),
        "CAUSAL": problem.causal,
        "OFFSET": offset.value,
        "HAS_STARTS": problem.key_starts is not None,
        "HAS_LENGTHS": problem.key_lengths is not None,
        "DROPOUT": problem.dropout_p > 0,
        "PRECISION": float32_products(),
    }


def without_tensors(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that are no tensors, nor stand for one that is absent."""
    return {name: x for name, x in arguments.items() if x is not None and not isinstance(x, Tensor)}


def in_log2(problem: Problem) -> Problem:
    """Return the problem with scale and slopes in units of log2, as the backward kernels read them.

    A table by distance gets room of its own, which the kernel of delta fills.
    """
    bias = problem.bias
    if bias is not None and problem.bias_kind != "dense":
        bias = torch.empty_like(bias) if problem.bias_kind == "distance" else bias * _LOG2E
    return dataclasses.replace(problem, bias=bias, softmax_scale=problem.softmax_scale * _LOG2E)


def any_bias_arguments(problem: Problem) -> dict[str, Any]:
    """Return what the kernels that take any bias, and documents, need besides."""
    batch, head, row = bias_strides(problem.bias) if problem.bias_kind == "dense" else (0, 0, 0)
    return {
        "Bias": problem.bias,
        "bias_batch": batch,
        "bias_head": head,
        "bias_row": row,
        "CuQ": problem.cu_seqlens_q,
        "CuK": problem.cu_seqlens_k,
        "BIAS": _BIAS_KINDS[problem.bias_kind],
        "RADIUS": bias_radius(problem),
        "VARLEN": problem.packed,
        "ASM": problem.q.is_cuda and not triton.knobs.runtime.interpret and torch.version.hip is None,
    }


def bias_place(problem: Problem, tile: Tile) -> dict[str, Any]:
    """Return where a kernel loads a dense bias and when it waits for its products.

    A product that starts from the bias divides it by the scale, which must leave room for that.
    """
    place = tile.bias
    if place == "start" and problem.softmax_scale < _LEAST_DIVISOR:
        place = "before"
    return {"BIAS_PLACE": _BIAS_PLACES[place], "SETTLE": tile.settled}


def bias_strides(bias: Tensor | None) -> tuple[int, int, int]:
    """Return the strides of a dense bias over batch, head and query; 0 where it is broadcast."""
    if bias is None:
        return 0, 0, 0
    batch, head, row = (0 if n == 1 else s for n, s in zip(bias.shape[:3], bias.stride()[:3], strict=True))
    return batch, head, row


def strides(name: str, x: Tensor) -> dict[str, int]:
    """Return the strides of a tensor over batch, row and head as arguments named after it."""
    batch = x.stride(0) if x.ndim == 4 else 0
    return {f"{name}_batch": batch, f"{name}_row": x.stride(-3), f"{name}_head": x.stride(-2)}


def unit_stride(x: Tensor) -> Tensor:
    """Return the tensor with rows whose elements are neighbours, copied only where they are not."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def readable(problem: Problem) -> Problem:
    """Return the problem with rows whose elements are neighbours, copied only where they are not."""
    bias = problem.bias
    if bias is not None:
        bias = unit_stride(bias) if problem.bias_kind == "dense" else bias.float().contiguous()
    q, k, v = unit_stride(problem.q), unit_stride(problem.k), unit_stride(problem.v)
    if q is problem.q and k is problem.k and v is problem.v and bias is problem.bias:
        return problem
    return dataclasses.replace(problem, q=q, k=k, v=v, bias=bias)
