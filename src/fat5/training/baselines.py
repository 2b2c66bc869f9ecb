"""What a loss is worth: the loss of a model that knows nothing but how often each target token occurs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def target_counts(batches: Iterable[dict[str, Any]], vocab_size: int, ignore_index: int = -100) -> Tensor:
    """Return how often each id is a target in the batches, int64 [vocab_size]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for batch in batches:
        labels = batch["labels"]
        counts += torch.bincount(labels[labels != ignore_index].flatten(), minlength=vocab_size)
    return counts


def unigram_loss(train: Tensor, evaluation: Tensor) -> float:
    """Return the cross-entropy of the evaluation targets under the training targets' add-one smoothed frequencies.

        -sum_t e_t ln((n_t + 1) / (N + V)) / sum_t e_t

    with n the counts of training, N their sum, V the vocabulary and e the counts of evaluation; in nats a target token.

    Args:
        train: int64 [vocab_size], from `target_counts`.
        evaluation: int64 [vocab_size].
    """
    smoothed = (train + 1).double()
    surprise = smoothed.sum().log() - smoothed.log()
    return float((evaluation * surprise).sum() / evaluation.sum())
