"""Dropout as a module."""

from __future__ import annotations

from torch import Tensor, nn


class Dropout(nn.Dropout):
    """PyTorch's dropout, at less cost where it does nothing: a step of decoding passes four of them a layer."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the input, in training with elements dropped and the others scaled."""
        return super().forward(input) if self.training else input
