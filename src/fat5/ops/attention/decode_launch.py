"""Launching the kernels for a few queries a row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fat5.ops.attention.decode import decode_kernel, join_kernel
from fat5.ops.attention.problem import Problem
from fat5.ops.attention.tiles import Tile
from fat5.ops.prepared_launch import Relaunched, ceil_power_of_2

decode_kernel, join_kernel = Relaunched(decode_kernel), Relaunched(join_kernel)

MAX_QUERIES = 16
"""Most queries of a row that one program takes: the least that a matrix unit multiplies."""

_MIN_KEYS = 512  # keys of a share: below, joining the shares costs more than it saves
_MAX_SPLITS = 64
_PROGRAMS = 4  # a multiprocessor
_NOT_READ = ("Seed", "threshold", "keep_scale", "DROPOUT", "CuQ", "CuK", "VARLEN")


def is_decoding(problem: Problem) -> bool:
    """Return whether each row has so few queries that its keys are worth splitting."""
    return not problem.packed and problem.dropout_p == 0 and problem.num_queries <= MAX_QUERIES


def split_count(problem: Problem, processors: int) -> int:
    """Return among how many programs the keys of a head are split, on a card with this many multiprocessors."""
    heads = problem.batch * problem.heads
    return max(1, min(_PROGRAMS * processors // heads, problem.num_keys // _MIN_KEYS, _MAX_SPLITS))


def run_decode(problem: Problem, tile: Tile, arguments: dict[str, Any], splits: int) -> None:
    """Fill the output and the log2-sum-exp.

    Args:
        problem: What to compute.
        tile: Its keys, warps and stages.
        arguments: What the forward kernel takes, `O` and `LSE` among it.
        splits: Shares of the keys.
    """
    arguments = {name: value for name, value in arguments.items() if name not in _NOT_READ}
    out: Tensor = arguments["O"]
    heads, queries, dim = problem.batch * problem.heads, problem.num_queries, problem.head_dim
    parts = part_lse = None
    if splits > 1:
        parts = torch.empty(heads, splits, queries, dim, dtype=torch.float32, device=out.device)
        part_lse = torch.empty(heads, splits, queries, dtype=torch.float32, device=out.device)
    decode_kernel[(splits, heads)](
        Parts=parts, PartLSE=part_lse, BM=MAX_QUERIES, BN=tile.keys, SPLIT=splits > 1, **tile.options(), **arguments
    )
    if splits > 1:
        join_kernel[(heads, queries)](
            parts, part_lse, out, arguments["LSE"], out.stride(0), out.stride(1), out.stride(2),
            problem.heads, queries, splits,
            D=dim, BLOCK_D=arguments["BLOCK_D"], SPLITS=ceil_power_of_2(splits),
        )  # fmt: skip
