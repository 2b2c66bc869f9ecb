"""Loss and gradient of one block of rows of logits, computed in the block's own memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class LossTerms(NamedTuple):
    """Which loss is computed: the label that marks ignored rows and the weights of the terms."""

    ignore_index: int
    label_smoothing: float
    z_loss: float


class BlockLosses(NamedTuple):
    """What one block of rows gives, each [R]; `total` is the sum of the softmax numerators."""

    loss: Tensor
    z_loss: Tensor
    correct: Tensor
    lse: Tensor
    total: Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type the arithmetic runs in: float64 for float64, float32 for the rest."""
    return torch.promote_types(dtype, torch.float32)


def rows_per_block(num_rows: int, vocab_size: int, dtype: torch.dtype, chunk_bytes: int) -> int:
    """Return how many rows' logits, with their float32 copy if they are shorter, fit `chunk_bytes`; one is the least.

    Blocks of this size come out equally long, give or take a row.
    """
    wide = accumulation_dtype(dtype)
    bytes_per_logit = wide.itemsize if wide == dtype else wide.itemsize + dtype.itemsize
    most = max(1, chunk_bytes // (vocab_size * bytes_per_logit))
    blocks = max(1, -(-num_rows // most))
    return max(1, -(-num_rows // blocks))


def label_error(vocab_size: int, ignore_index: int) -> str:
    """Return what to say of a label out of range."""
    return f"labels must lie in [0, {vocab_size}) or equal ignore_index={ignore_index}"


def check_labels(labels: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Raise on a kept label outside [0, vocab_size): at once on a CPU, without a host synchronisation elsewhere."""
    wrong = ((labels < 0) | (labels >= vocab_size)) & (labels != ignore_index)
    expected = label_error(vocab_size, ignore_index)
    if labels.device.type != "cpu":
        torch._assert_async(~wrong.any(), expected)
    elif wrong.any():
        first = int(wrong.nonzero()[0])
        raise ValueError(f"{expected}, got {int(labels[first])} at position {first} of the flattened labels")


def row_blocks(labels: Tensor, ignore_index: int, size: int) -> Iterator[slice | Tensor]:
    """Yield the indices of blocks of at most `size` rows that together hold every row that counts.

    On a CPU ignored rows are left out; elsewhere that would make the host wait for the labels, so they come along: a
    tensor of indices names kept rows alone, a slice may hold ignored ones.
    """
    if labels.device.type == "cpu":
        kept = (labels != ignore_index).nonzero().squeeze(1)
        if len(kept) < len(labels):
            yield from (kept[start : start + size] for start in range(0, len(kept), size))
            return
    for start in range(0, len(labels), size):
        yield slice(start, start + size)


def losses_(logits: Tensor, labels: Tensor, terms: LossTerms) -> BlockLosses:
    """Return the losses of a block and overwrite `logits` [R, V] with the softmax numerators exp(logit - maximum)."""
    kept = labels != terms.ignore_index
    at_label = logits.gather(1, labels.where(kept, 0)[:, None]).squeeze(1)
    mean = logits.mean(dim=1) if terms.label_smoothing else at_label
    maximum, argmax = logits.max(dim=1)  # the lowest index on ties
    total = logits.sub_(maximum[:, None]).exp_().sum(dim=1)
    lse = maximum + total.log()
    z_share = terms.z_loss * lse.square()
    loss = lse - torch.lerp(at_label, mean, terms.label_smoothing) + z_share
    return BlockLosses(loss.where(kept, 0), z_share.where(kept, 0), (argmax == labels) & kept, lse, total)


def gradients_(
    numerators: Tensor, labels: Tensor, terms: LossTerms, lse: Tensor, total: Tensor | float, grad: Tensor | float
) -> None:
    """Overwrite `numerators` [R, V] with the gradient of the block's losses by its logits.

    `g [softmax (1 + 2 z lse) - (1 - eps) onehot - eps / V]` with softmax = numerators / `total` and g = `grad`, one a
    row or one for all; 0 on ignored rows.
    """
    kept = labels != terms.ignore_index
    row = torch.where(kept, grad, 0.0).to(numerators.dtype)
    numerators.mul_((row * (1.0 + 2.0 * terms.z_loss * lse) / total)[:, None])
    numerators.scatter_add_(1, labels.where(kept, 0)[:, None], ((terms.label_smoothing - 1.0) * row)[:, None])
    if terms.label_smoothing:
        numerators.sub_((terms.label_smoothing / numerators.shape[1] * row)[:, None])
