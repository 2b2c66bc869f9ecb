"""The `torch` backend of linear_cross_entropy: the logits exist one block of rows at a time and are never kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fat5.ops.loss.hidden_gradients import HiddenGradients
from fat5.ops.loss.rows import (
    LossTerms,
    accumulation_dtype,
    check_labels,
    gradients_,
    losses_,
    row_blocks,
    rows_per_block,
)


class _Block(NamedTuple):
    """The rows of one block: where they lie, their hidden states, labels and logits."""

    rows: slice | Tensor
    hidden: Tensor  # [R, D]
    targets: Tensor  # [R]
    logits: Tensor  # [R, V], float32 or float64
    narrow: Tensor  # [R, V], the type of hidden; the same memory as logits where that is the same type


def _blocks(hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, chunk_bytes: int) -> Iterator[_Block]:
    size = rows_per_block(len(labels), len(weight), hidden.dtype, chunk_bytes)
    wide = accumulation_dtype(hidden.dtype)
    narrow_buffer = hidden.new_empty(size, len(weight))
    wide_buffer = narrow_buffer if wide == hidden.dtype else hidden.new_empty(size, len(weight), dtype=wide)
    for rows in row_blocks(labels, ignore_index, size):
        targets = labels[rows]
        states = hidden[rows]
        if isinstance(rows, slice):  # ignored rows may have come along: a NaN in one must not reach the gradients
            states = states.masked_fill((targets == ignore_index)[:, None], 0)
        narrow, logits = narrow_buffer[: len(targets)], wide_buffer[: len(targets)]
        torch.mm(states, weight.t(), out=narrow)
        if wide != hidden.dtype:
            logits.copy_(narrow)
        yield _Block(rows, states, targets, logits, narrow)


def _add(gradients: HiddenGradients, block: _Block, weight: Tensor) -> None:
    """Add a block whose `logits` hold the gradient by the logits."""
    if block.narrow.dtype != block.logits.dtype:
        block.narrow.copy_(block.logits)
    gradients.add(block.rows, block.narrow, block.hidden, weight, block.logits)


def run_sum(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    terms: LossTerms,
    chunk_bytes: int,
    hidden_gradient: bool,
    weight_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return summed loss and z share, correctness and the gradients; see `custom_ops.define_hidden_ops`."""
    check_labels(labels, len(weight), terms.ignore_index)
    loss, z_share = (hidden.new_zeros((), dtype=accumulation_dtype(hidden.dtype)) for _ in range(2))
    correct = labels.new_zeros(labels.shape, dtype=torch.bool)
    gradients = HiddenGradients(hidden, weight, hidden_gradient, weight_gradient)
    for block in _blocks(hidden, weight, labels, terms.ignore_index, chunk_bytes):
        result = losses_(block.logits, block.targets, terms)
        loss += result.loss.sum()
        z_share += result.z_loss.sum()
        correct[block.rows] = result.correct
        if gradients.wanted:
            gradients_(block.logits, block.targets, terms, result.lse, result.total, 1.0)
            _add(gradients, block, weight)
    return loss, z_share, correct, *gradients.totals()


def run_rows(
    hidden: Tensor, weight: Tensor, labels: Tensor, terms: LossTerms, chunk_bytes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return loss, z share, correctness and log-sum-exp [N]; see `custom_ops.define_hidden_ops`."""
    check_labels(labels, len(weight), terms.ignore_index)
    loss, z_share, lse = (hidden.new_zeros(labels.shape, dtype=accumulation_dtype(hidden.dtype)) for _ in range(3))
    correct = labels.new_zeros(labels.shape, dtype=torch.bool)
    for block in _blocks(hidden, weight, labels, terms.ignore_index, chunk_bytes):
        result, rows = losses_(block.logits, block.targets, terms), block.rows
        loss[rows], z_share[rows], correct[rows], lse[rows] = result[:4]
    return loss, z_share, correct, lse


def run_rows_backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    lse: Tensor,
    terms: LossTerms,
    chunk_bytes: int,
    hidden_gradient: bool,
    weight_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Recompute the logits and return the gradients; see `custom_ops.define_hidden_ops`."""
    gradients = HiddenGradients(hidden, weight, hidden_gradient, weight_gradient)
    for block in _blocks(hidden, weight, labels, terms.ignore_index, chunk_bytes):
        row_lse = lse[block.rows]
        block.logits.sub_(row_lse[:, None]).exp_()
        gradients_(block.logits, block.targets, terms, row_lse, 1.0, grad[block.rows])
        _add(gradients, block, weight)
    return gradients.totals()


def run_scale(grad: Tensor, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a gradient times a scalar, rounded once to a type."""
    out = torch.empty_like(gradient, dtype=dtype)
    # One dimension: a scalar would be rounded to the gradient's type.
    return torch.mul(gradient, grad.reshape(1).to(accumulation_dtype(gradient.dtype)), out=out)
