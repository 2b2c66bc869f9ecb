"""Plain PyTorch cross-entropies: the yardstick of the tests, in the type of their inputs (give them float64)."""

from __future__ import annotations

import torch
from torch import Tensor

from fat5.ops.loss.api import CrossEntropyOutput


def cross_entropy_reference(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> CrossEntropyOutput:
    """Return the fields of `cross_entropy` by its formula, all logits at once, differentiable any number of times."""
    kept = labels != ignore_index
    lse = torch.logsumexp(logits, dim=-1)
    at_label = logits.gather(-1, labels.where(kept, 0)[..., None]).squeeze(-1)
    nll = (1.0 - label_smoothing) * (lse - at_label) + label_smoothing * (lse - logits.mean(-1))
    z_share = (z_loss * lse.square()).where(kept, 0.0)
    loss = nll.where(kept, 0.0) + z_share
    count = kept.sum()
    if reduction != "none":
        divisor = count.clamp(min=1) if reduction == "mean" else 1
        loss, z_share = loss.sum() / divisor, z_share.sum() / divisor
    return CrossEntropyOutput(loss, z_share, (logits.argmax(-1) == labels) & kept, count)


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> CrossEntropyOutput:
    """Return the fields of `linear_cross_entropy` with all logits in memory."""
    return cross_entropy_reference(
        hidden @ weight.mT,
        labels,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        reduction=reduction,
    )
