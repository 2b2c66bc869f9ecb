"""Launching the kernels for a few queries a row."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from fat5.ops.attention.decode import decode_kernel, join_kernel
from fat5.ops.attention.kernel_arguments import (
    any_bias_arguments,
    block_d,
    common_arguments,
    strides,
    without_tensors,
)
from fat5.ops.attention.problem import Problem
from fat5.ops.attention.tiles import Tile
from fat5.ops.prepared_launch import PreparedLaunch, PreparedLaunches, ceil_power_of_2

_decode_launches, _join_launches = PreparedLaunches(), PreparedLaunches()

MAX_QUERIES = 16
"""Most queries of a row that one program takes: the least that a matrix unit multiplies."""

_MIN_KEYS = 512  # keys of a share: below, joining the shares costs more than it saves
_MAX_SPLITS = 64
_PROGRAMS = 4  # a multiprocessor
_MOVING = ("offset", "k_batch", "k_row", "k_head", "v_batch", "v_row", "v_head", "N")
_NOT_READ = ("Seed", "threshold", "keep_scale", "DROPOUT", "CuQ", "CuK", "VARLEN")


def is_decoding(problem: Problem) -> bool:
    """Return whether each row has so few queries that its keys are worth splitting."""
    return not problem.packed and problem.dropout_p == 0 and problem.num_queries <= MAX_QUERIES


def split_count(problem: Problem, processors: int) -> int:
    """Return among how many programs the keys of a head are split, on a card with this many multiprocessors."""
    heads = problem.batch * problem.heads
    return max(1, min(_PROGRAMS * processors // heads, problem.num_keys // _MIN_KEYS, _MAX_SPLITS))


def decode_signature(problem: Problem) -> Hashable:
    """Return what a launch's scalars and constants depend on, but for `_moving`: a step of decoding finds one at hand.

    The kernel's binary is the same for most lengths, and a dynamic cache has another one at each step.
    """
    q, bias = problem.q, problem.bias
    return (
        q.shape, q.stride(), q.dtype, q.device, problem.bias_kind,
        None if bias is None else (bias.shape, bias.stride()), problem.offset is None, problem.offsets is None,
        problem.key_starts is None, problem.key_lengths is None, problem.softmax_scale, problem.causal,
    )  # fmt: skip


def _moving(problem: Problem) -> tuple[int, ...]:
    """Return how many keys there are, where they lie and how far the queries have come, as `_MOVING` names it."""
    (k_batch, k_row, k_head, _), (v_batch, v_row, v_head, _) = problem.k.stride(), problem.v.stride()
    return problem.offset or 0, k_batch, k_row, k_head, v_batch, v_row, v_head, problem.num_keys


def run_decode(problem: Problem, tile: Tile, out: Tensor, lse: Tensor, splits: int, signature: Hashable) -> None:
    """Fill the output and the log2-sum-exp.

    Args:
        problem: What to compute.
        tile: Its keys, warps and stages.
        out: Output.
        lse: Log2-sum-exp.
        splits: Shares of the keys.
        signature: `decode_signature`, and all else that the arguments depend on.
    """
    heads, queries = problem.batch * problem.heads, problem.num_queries
    parts = part_lse = None
    if splits > 1:
        parts = out.new_empty(heads, splits, queries, problem.head_dim, dtype=torch.float32)
        part_lse = out.new_empty(heads, splits, queries, dtype=torch.float32)
    launch = _decode_launches.get((signature, tile, splits), lambda: _prepare_decode(problem, tile, out, splits))
    launch(
        problem.q, problem.k, problem.v, out, lse, parts, part_lse, problem.bias, problem.key_starts,
        problem.key_lengths, problem.offsets, *_moving(problem),
    )  # fmt: skip
    if splits > 1:
        launch = _join_launches.get((signature, splits), lambda: _prepare_join(problem, out, splits))
        launch(parts, part_lse, out, lse)


def _prepare_decode(problem: Problem, tile: Tile, out: Tensor, splits: int) -> PreparedLaunch:
    arguments = strides("o", out) | common_arguments(problem) | any_bias_arguments(problem)
    arguments = {name: x for name, x in without_tensors(arguments).items() if name not in (*_NOT_READ, *_MOVING)}
    return PreparedLaunch(
        decode_kernel, (splits, problem.batch * problem.heads), BM=MAX_QUERIES, BN=tile.keys, SPLIT=splits > 1,
        **tile.options(), **arguments,
    )  # fmt: skip


def _prepare_join(problem: Problem, out: Tensor, splits: int) -> PreparedLaunch:
    return PreparedLaunch(
        join_kernel, (problem.batch * problem.heads, problem.num_queries), **strides("o", out), H=problem.heads,
        M=problem.num_queries, splits=splits, D=problem.head_dim, BLOCK_D=block_d(problem),
        SPLITS=ceil_power_of_2(splits),
    )  # fmt: skip
