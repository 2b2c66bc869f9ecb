"""Gated GELU by its formula: the yardstick of the tests."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def gated_gelu_reference(gate: Tensor, up: Tensor, *, approximate: str = "tanh") -> Tensor:
    """Return `gate * Phi(gate) * up` in the type of the inputs; give it float64 for a yardstick."""
    if approximate == "tanh":
        half = 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    else:
        half = 0.5 * torch.erfc(-gate / math.sqrt(2))
    return gate * half * up
