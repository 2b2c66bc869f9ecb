"""Matrices one below the other, for many groups of them in a few launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("fat5::join_matrices", mutates_args=())
def join_matrices(matrices: list[Tensor], counts: list[int]) -> list[Tensor]:
    """Return the matrices of each group one below the other, differentiably, as `torch.cat` does for one group.

    Their copies are the same few launches for all groups, where a group of small matrices is hardly worth one.

    Args:
        matrices: [rows, columns] of all groups in order, of one type and on one device.
        counts: Matrices of each group.
    """
    joined, places, first = [], [], 0
    for count in counts:
        group = matrices[first : first + count]
        rows = [len(matrix) for matrix in group]
        joined.append(group[0].new_empty(sum(rows), group[0].shape[1]))
        places += joined[-1].split(rows)
        first += count
    torch._foreach_copy_(places, matrices)
    return joined


@join_matrices.register_fake
def _(matrices, counts):
    joined, first = [], 0
    for count in counts:
        group = matrices[first : first + count]
        joined.append(group[0].new_empty(sum(matrix.shape[0] for matrix in group), group[0].shape[1]))
        first += count
    return joined


def _setup(ctx: Any, inputs: tuple[list[Tensor], list[int]], output: list[Tensor]) -> None:
    matrices, ctx.counts = inputs
    ctx.rows = [len(matrix) for matrix in matrices]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[list[Tensor | None], None]:
    parts: list[Tensor | None] = []
    first = 0
    for grad, count in zip(grads, ctx.counts, strict=True):
        rows = ctx.rows[first : first + count]
        parts += [None] * count if grad is None else grad.split(rows)
        first += count
    return parts, None


join_matrices.register_autograd(_differentiate, setup_context=_setup)
