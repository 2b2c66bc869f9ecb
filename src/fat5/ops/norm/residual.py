"""Adding to the residual stream, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT16_LIMIT = 64512.0
"""What T5 clamps float16 states to: the largest finite number less 1,000, in that type."""


def add_residual(x: Tensor, residual: Tensor) -> Tensor:
    """Return `x + residual`, in float16 within `FLOAT16_LIMIT`, as T5 does, so that an overflow stays finite."""
    total = x + residual
    return total.clamp(-FLOAT16_LIMIT, FLOAT16_LIMIT) if total.dtype == torch.float16 else total
