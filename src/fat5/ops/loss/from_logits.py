"""The `torch` backend of cross_entropy: per-row losses of given logits, one float32 block of them at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from fat5.ops.loss.rows import (
    LossTerms,
    accumulation_dtype,
    check_labels,
    gradients_,
    losses_,
    row_blocks,
    rows_per_block,
)


def _load_(block: Tensor, logits: Tensor, rows: slice | Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Copy rows of `logits` into `block`; an ignored row becomes 0, so that a NaN in it never matters."""
    if isinstance(rows, slice):
        return block.copy_(logits[rows]).masked_fill_((labels == ignore_index)[:, None], 0)
    if block.dtype == logits.dtype:
        return torch.index_select(logits, 0, rows, out=block)
    return block.copy_(logits.index_select(0, rows))


def run_rows(
    logits: Tensor, labels: Tensor, terms: LossTerms, chunk_bytes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return loss, z share, correctness and log-sum-exp [N]; see `custom_ops.define_logits_ops`."""
    num_rows, vocab_size = logits.shape
    check_labels(labels, vocab_size, terms.ignore_index)
    wide = accumulation_dtype(logits.dtype)
    loss, z_share, lse = (logits.new_zeros(num_rows, dtype=wide) for _ in range(3))
    correct = labels.new_zeros(num_rows, dtype=torch.bool)
    size = rows_per_block(num_rows, vocab_size, logits.dtype, chunk_bytes)
    buffer = logits.new_empty(size, vocab_size, dtype=wide)
    for rows in row_blocks(labels, terms.ignore_index, size):
        targets = labels[rows]
        block = losses_(_load_(buffer[: len(targets)], logits, rows, targets, terms.ignore_index), targets, terms)
        loss[rows], z_share[rows], correct[rows], lse[rows] = block.loss, block.z_loss, block.correct, block.lse
    return loss, z_share, correct, lse


def run_rows_backward(
    grad: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, terms: LossTerms, chunk_bytes: int
) -> Tensor:
    """Return the gradient by the logits [N, V]; see `custom_ops.define_logits_ops`."""
    num_rows, vocab_size = logits.shape
    dlogits = logits.new_zeros(num_rows, vocab_size)
    size = rows_per_block(num_rows, vocab_size, logits.dtype, chunk_bytes)
    buffer = logits.new_empty(size, vocab_size, dtype=lse.dtype)
    for rows in row_blocks(labels, terms.ignore_index, size):
        targets = labels[rows]
        block = _load_(buffer[: len(targets)], logits, rows, targets, terms.ignore_index)
        block.sub_(lse[rows][:, None]).exp_()
        gradients_(block, targets, terms, lse[rows], 1.0, grad[rows])
        dlogits[rows] = block.to(dlogits.dtype)
    return dlogits
