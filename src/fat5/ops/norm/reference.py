"""Plain PyTorch RMS norm: the yardstick of the tests."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Return `x * rsqrt(mean(x^2) + eps) * weight` in the wider of the two dtypes; give it float64 for a yardstick."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
