"""What happened since the last log: real tokens, correct predictions, z-loss and the seconds they took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class LogWindow:
    """Sums between two logs. Tensors stay on the device until `close`, so that no step waits for a copy.

    Args:
        device: the model's.

    Attributes:
        tokens: real tokens of both sides, on this rank.
        targets: real target tokens, on this rank.
        steps: optimiser steps.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.reset()

    def reset(self) -> None:
        """Start a new window now."""
        self.tokens = self.targets = self.steps = 0
        self._sums = torch.zeros(2, dtype=torch.float64, device=self.device)  # correct, z-loss
        self._started = time.perf_counter()
        self._paused = 0.0

    def add(self, correct: Tensor, kept: Tensor, z_loss: Tensor) -> None:
        """Add a micro-batch.

        Args:
            correct: bool, a prediction each.
            kept: bool of the same shape, False where there is no target.
            z_loss: its share of the accumulated step's z-loss.
        """
        self._sums += torch.stack([(correct & kept).sum().double(), z_loss.detach().double()])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the time spent inside (evaluation, saving) out of the speed."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - started

    def close(self) -> tuple[Tensor, float]:
        """Return float64 [correct, z-loss a step, target tokens, tokens] of this rank, and the seconds; start anew."""
        seconds = time.perf_counter() - self._started - self._paused
        counts = torch.tensor([self.targets, self.tokens], dtype=torch.float64, device=self.device)
        self._sums[1] /= max(self.steps, 1)
        sums = torch.cat([self._sums, counts])
        self.reset()
        return sums, seconds
