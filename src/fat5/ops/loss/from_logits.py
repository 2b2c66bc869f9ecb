"""Torch backend of cross_entropy: per-row losses of given logits, one float32 block of them at a time."""

from __future__ import annotations

from typing import Any

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


@torch.library.custom_op("fat5::cross_entropy_rows", mutates_args=())
def cross_entropy_rows(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, chunk_bytes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return loss, z share, correctness and log-sum-exp [N] of `logits` [N, V]; zeros on ignored rows."""
    terms = LossTerms(ignore_index, label_smoothing, z_loss)
    num_rows, vocab_size = logits.shape
    check_labels(labels, vocab_size, ignore_index)
    wide = accumulation_dtype(logits.dtype)
    loss, z_share, lse = (logits.new_zeros(num_rows, dtype=wide) for _ in range(3))
    correct = labels.new_zeros(num_rows, dtype=torch.bool)
    size = rows_per_block(num_rows, vocab_size, logits.dtype, chunk_bytes)
    buffer = logits.new_empty(size, vocab_size, dtype=wide)
    for rows in row_blocks(labels, ignore_index, size):
        targets = labels[rows]
        block = losses_(_load_(buffer[: len(targets)], logits, rows, targets, ignore_index), targets, terms)
        loss[rows], z_share[rows], correct[rows], lse[rows] = block.loss, block.z_loss, block.correct, block.lse
    return loss, z_share, correct, lse


@cross_entropy_rows.register_fake
def _(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, chunk_bytes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss, z_share, lse = (logits.new_empty(len(labels), dtype=accumulation_dtype(logits.dtype)) for _ in range(3))
    return loss, z_share, labels.new_empty(len(labels), dtype=torch.bool), lse


@torch.library.custom_op("fat5::cross_entropy_rows_backward", mutates_args=())
def cross_entropy_rows_backward(
    grad: Tensor,
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    chunk_bytes: int,
) -> Tensor:
    """Return the gradient by `logits` [N, V], in their type, for the per-row gradients `grad` [N]."""
    terms = LossTerms(ignore_index, label_smoothing, z_loss)
    num_rows, vocab_size = logits.shape
    dlogits = logits.new_zeros(num_rows, vocab_size)
    size = rows_per_block(num_rows, vocab_size, logits.dtype, chunk_bytes)
    buffer = logits.new_empty(size, vocab_size, dtype=lse.dtype)
    for rows in row_blocks(labels, ignore_index, size):
        targets = labels[rows]
        block = _load_(buffer[: len(targets)], logits, rows, targets, ignore_index)
        block.sub_(lse[rows][:, None]).exp_()
        gradients_(block, targets, terms, lse[rows], 1.0, grad[rows])
        dlogits[rows] = block.to(dlogits.dtype)
    return dlogits


@cross_entropy_rows_backward.register_fake
def _(
    grad: Tensor,
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    chunk_bytes: int,
) -> Tensor:
    return logits.new_empty(logits.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, labels, *ctx.settings = inputs
    ctx.save_for_backward(logits, labels, output[3])


def _backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    logits, labels, lse = ctx.saved_tensors
    return cross_entropy_rows_backward(grad, logits, labels, lse, *ctx.settings), *(None,) * 5


cross_entropy_rows.register_autograd(_backward, setup_context=_setup_context)
