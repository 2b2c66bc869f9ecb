"""Evaluation sums: loss and masked accuracy a kept target token, overall and by denoiser, keeping no logit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# The sums of one denoiser, in this order.
_LOSS, _CORRECT, _COUNT, _TEXT_CORRECT, _TEXT_COUNT = range(5)


def denoiser_of_each_token(labels: Tensor, denoiser_ids: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return the denoiser id of every target token.

    Args:
        labels: [B, L], or [total] when packed.
        denoiser_ids: int64 [B], or [documents] when packed; -1 on empty slots.
        cu_seqlens: int32 [documents + 1], the decoder's offsets, when packed; the tail repeats the last one.

    Returns:
        int64 of labels' shape. Rows beyond the last document get the last slot's id; their labels are -100 anyway.
    """
    if cu_seqlens is None:
        return denoiser_ids[:, None].expand_as(labels)
    rows = torch.arange(labels.numel(), device=labels.device, dtype=cu_seqlens.dtype)
    document = torch.bucketize(rows, cu_seqlens[1:], right=True).clamp_max(denoiser_ids.numel() - 1)
    return denoiser_ids[document].view_as(labels)


@contextmanager
def plain_cross_entropy(config: Any) -> Iterator[None]:
    """Leave z-loss and label smoothing out of a model's loss inside the block; they serve training, not measuring.

    Args:
        config: the model's configuration, which its forward reads at each call.
    """
    saved = {name: getattr(config, name) for name in ("z_loss", "label_smoothing")}
    try:
        for name in saved:
            setattr(config, name, 0.0)
        yield
    finally:
        for name, value in saved.items():
            setattr(config, name, value)


class EvaluationSums:
    """Sums of cross-entropy and of correct predictions, one row a denoiser, in float64 on the model's device.

    Args:
        names: the denoisers' names, in the order of their ids.
        vocab_size: rows of the model's LM head.
        structural_ids: token ids that are not text (sentinels, EOS); `accuracy_text` leaves them out.
        device: where the sums live. Nothing is copied to the host before `metrics`.
    """

    def __init__(
        self, names: Sequence[str], vocab_size: int, structural_ids: Iterable[int], device: torch.device
    ) -> None:
        self.names = list(names)
        self.sums = torch.zeros(len(self.names), 5, dtype=torch.float64, device=device)
        self._is_text = torch.ones(vocab_size, dtype=torch.bool, device=device)
        self._is_text[torch.tensor(sorted(structural_ids), dtype=torch.int64, device=device)] = False

    def add(self, losses: Tensor, correct: Tensor, labels: Tensor, denoisers: Tensor, ignore_index: int = -100) -> None:
        """Add one batch.

        Args:
            losses: cross-entropy of each token, labels' shape; only kept tokens are read.
            correct: bool, labels' shape.
            labels: int64 target ids, `ignore_index` where there is none.
            denoisers: int64 denoiser id of each token, labels' shape.
            ignore_index: the label of tokens that do not count.
        """
        kept = labels != ignore_index
        text = kept & self._is_text[labels.where(kept, 0)]
        columns = (losses.double().where(kept, 0.0), correct & kept, kept, correct & text, text)
        values = torch.stack([column.double().flatten() for column in columns], dim=1)  # [tokens, 5]
        self.sums.index_add_(0, denoisers.where(kept, 0).flatten(), values)

    def metrics(self, prefix: str = "eval") -> dict[str, float]:
        """Return loss, perplexity and the accuracies, overall (`eval_loss`) and by denoiser (`eval_loss/NAME`).

        Natural logarithms, per kept target token. A denoiser that drew no document is left out.
        """
        rows = self.sums.cpu()
        overall = _summary(rows.sum(dim=0).tolist())
        result = {f"{prefix}_{name}": value for name, value in overall.items()}
        for denoiser, row in zip(self.names, rows.tolist(), strict=True):
            if row[_COUNT]:
                result |= {f"{prefix}_{name}/{denoiser}": value for name, value in _summary(row).items()}
        return result


def _summary(row: list[float]) -> dict[str, float]:
    loss = row[_LOSS] / max(row[_COUNT], 1.0)
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),  # e**709 is the largest float64
        "accuracy": row[_CORRECT] / max(row[_COUNT], 1.0),
        "accuracy_text": row[_TEXT_CORRECT] / max(row[_TEXT_COUNT], 1.0),
        "target_tokens": row[_COUNT],
    }
