"""The `triton` backend of both losses: kernels on the logits, and PyTorch's matrix products around them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fat5.ops.loss.custom_ops import define_hidden_ops, define_logits_ops
from fat5.ops.loss.hidden_gradients import HiddenGradients
from fat5.ops.loss.launch import RowResults, count_labels, neighbours, scaled, store_gradient, store_losses, sums
from fat5.ops.loss.rows import LossTerms

_ROW_MULTIPLE = 128  # rows of a tile of the matrix products
_BYTE_MULTIPLE = 16  # what rows of the working logits start at, whatever the vocabulary


def run_rows(
    logits: Tensor, labels: Tensor, terms: LossTerms, chunk_bytes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return loss, z share, correctness and log-sum-exp [N]; see `custom_ops.define_logits_ops`."""
    logits = neighbours(logits)
    count_labels(labels, logits.shape[1], terms.ignore_index)
    results = RowResults.allocate(labels)
    store_losses(logits, labels, terms, results)
    return results.loss, results.z_loss, results.correct, results.lse


def run_rows_backward(
    grad: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, terms: LossTerms, chunk_bytes: int
) -> Tensor:
    """Return the gradient by the logits [N, V]; see `custom_ops.define_logits_ops`."""
    logits = neighbours(logits)
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    store_gradient(grad, logits, labels, lse, terms, gradient)
    return gradient


rows_op, rows_backward_op = define_logits_ops("triton", run_rows, run_rows_backward)


class _Chunk(NamedTuple):
    """Some rows: where they lie, their hidden states, labels and logits."""

    rows: slice
    states: Tensor  # [R, D], 0 on ignored rows
    labels: Tensor  # [R]
    logits: Tensor  # [R, V]


def chunk_rows(num_rows: int, vocab_size: int, itemsize: int, chunk_bytes: int) -> int:
    """Return how many rows' logits fit `chunk_bytes`, at least one: whole tiles of rows in chunks of like length."""
    most = max(1, chunk_bytes // (vocab_size * itemsize))
    multiple = _ROW_MULTIPLE if most >= _ROW_MULTIPLE else 1
    chunks = max(1, -(-num_rows // (most // multiple * multiple)))
    rows = -(-num_rows // chunks)
    return max(1, min(-(-rows // multiple) * multiple, num_rows))


def _chunks(hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, chunk_bytes: int) -> Iterator[_Chunk]:
    vocab_size, itemsize = len(weight), hidden.element_size()
    multiple = _BYTE_MULTIPLE // itemsize
    stride = -(-vocab_size // multiple) * multiple
    size = chunk_rows(len(labels), stride, itemsize, chunk_bytes)
    buffer = hidden.new_empty(size, stride)[:, :vocab_size]
    ignored = (labels == ignore_index)[:, None]
    for start in range(0, len(labels), size):
        rows = slice(start, start + size)
        # Ignored rows come along, since leaving them out would wait for their number; NaN must not.
        states = hidden[rows].masked_fill(ignored[rows], 0)
        logits = torch.mm(states, weight.t(), out=buffer[: len(states)])
        yield _Chunk(rows, states, labels[rows], logits)


def run_hidden_sum(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    terms: LossTerms,
    chunk_bytes: int,
    hidden_gradient: bool,
    weight_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return summed loss and z share, correctness and the gradients; see `custom_ops.define_hidden_ops`."""
    count_labels(labels, len(weight), terms.ignore_index)
    results = RowResults.allocate(labels)
    gradients = HiddenGradients(hidden, weight, hidden_gradient, weight_gradient)
    for chunk in _chunks(hidden, weight, labels, terms.ignore_index, chunk_bytes):
        gradient = chunk.logits if gradients.wanted else None
        store_losses(chunk.logits, chunk.labels, terms, results.of(chunk.rows), gradient=gradient)
        gradients.add(chunk.rows, chunk.logits, chunk.states, weight, chunk.logits)
    return *sums(results), results.correct, *gradients.totals()


def run_hidden_rows(
    hidden: Tensor, weight: Tensor, labels: Tensor, terms: LossTerms, chunk_bytes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return loss, z share, correctness and log-sum-exp [N]; see `custom_ops.define_hidden_ops`."""
    count_labels(labels, len(weight), terms.ignore_index)
    results = RowResults.allocate(labels)
    for chunk in _chunks(hidden, weight, labels, terms.ignore_index, chunk_bytes):
        store_losses(chunk.logits, chunk.labels, terms, results.of(chunk.rows))
    return results.loss, results.z_loss, results.correct, results.lse


def run_hidden_rows_backward(
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
    for rows, states, targets, logits in _chunks(hidden, weight, labels, terms.ignore_index, chunk_bytes):
        store_gradient(grad[rows], logits, targets, lse[rows], terms, logits)
        gradients.add(rows, logits, states, weight, logits)
    return gradients.totals()


hidden_ops = define_hidden_ops("triton", run_hidden_sum, run_hidden_rows, run_hidden_rows_backward, scaled)
