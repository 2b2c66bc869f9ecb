"""Checks at the door of the losses; each error quotes what was got and what was expected."""

from __future__ import annotations

import torch
from torch import Tensor

from fat5.errors import nearest

REDUCTIONS = ("mean", "sum", "none")
_LABEL_TYPES = (torch.int64, torch.int32)


def check_terms(name: str, label_smoothing: float, z_loss: float, reduction: str, chunk_bytes: int | None) -> None:
    """Raise ValueError on a setting outside its range."""
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"{name}: expected label_smoothing in [0, 1), got {label_smoothing}")
    if not 0.0 <= z_loss < float("inf"):
        raise ValueError(f"{name}: expected a finite z_loss >= 0, got {z_loss}")
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"{name}: expected reduction to be one of {', '.join(REDUCTIONS)}, "
            f"got {reduction!r}{nearest(str(reduction), REDUCTIONS)}"
        )
    if chunk_bytes is not None and chunk_bytes < 1:
        raise ValueError(f"{name}: expected chunk_bytes >= 1 or None, got {chunk_bytes}")


def check_logits(logits: Tensor, labels: Tensor) -> None:
    """Raise ValueError unless labels [...] fit logits [..., V]."""
    if logits.ndim == 0 or labels.shape != logits.shape[:-1]:
        raise ValueError(
            "cross_entropy: expected logits [..., V] and labels [...], "
            f"got logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)}"
        )
    if logits.shape[-1] == 0:
        raise ValueError(
            f"cross_entropy: expected a vocabulary of one or more, got logits of shape {tuple(logits.shape)}"
        )
    _check_types("cross_entropy", labels, logits=logits)


def check_hidden(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    """Raise ValueError unless labels [...] and weight [V, D] fit hidden [..., D]."""
    if hidden.ndim == 0 or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1] or labels.shape != hidden.shape[:-1]:
        raise ValueError(
            "linear_cross_entropy: expected hidden [..., D], weight [V, D] and labels [...], got hidden of shape "
            f"{tuple(hidden.shape)}, weight of shape {tuple(weight.shape)} and labels of shape {tuple(labels.shape)}"
        )
    if weight.shape[0] == 0:
        raise ValueError(
            f"linear_cross_entropy: expected a vocabulary of one or more, got weight of shape {tuple(weight.shape)}"
        )
    _check_types("linear_cross_entropy", labels, hidden=hidden, weight=weight)


def check_same_type(hidden: Tensor, weight: Tensor) -> None:
    """Raise ValueError unless hidden states and weight, after autocast, have one type."""
    if hidden.dtype != weight.dtype:
        raise ValueError(
            "linear_cross_entropy: expected hidden and weight of one type outside autocast, "
            f"got hidden {hidden.dtype} and weight {weight.dtype}"
        )


def _check_types(name: str, labels: Tensor, **tensors: Tensor) -> None:
    for argument, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name}: expected {argument} of a floating type, got {tensor.dtype}")
        if tensor.device != labels.device:
            raise ValueError(
                f"{name}: expected one device, got {argument} on {tensor.device} and labels on {labels.device}"
            )
    if labels.dtype not in _LABEL_TYPES:
        raise ValueError(f"{name}: expected labels of type int64 or int32, got {labels.dtype}")
