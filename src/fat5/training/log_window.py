"""What happened since the last log: real tokens, correct predictions, z-loss and the seconds they took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


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
        self._correct = torch.zeros((), dtype=torch.int64, device=self.device)
        self._z_loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self._started = time.perf_counter()
        self._paused = 0.0
        self._warm_up = 0.0
        self._warm_up_tokens = 0

    def add(self, correct: Tensor, z_loss: Tensor) -> None:
        """Add a micro-batch.

        Args:
            correct: bool, a prediction each; False where there is no target.
            z_loss: its share of the accumulated step's z-loss.
        """
        self._correct += correct.sum()
        self._z_loss += z_loss.detach()

    def begin_warm_up(self) -> None:
        """Note where a step begins that compiles, records or fills caches."""
        self._warm_up_started = time.perf_counter()
        self._tokens_before = self.tokens

    def end_warm_up(self) -> None:
        """Keep that step out of the speed: its time and its tokens."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - self._warm_up_started
        self._warm_up += seconds
        self._paused += seconds
        self._warm_up_tokens += self.tokens - self._tokens_before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the time spent inside (evaluation, saving) out of the speed."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - started

    def close(self) -> tuple[Tensor, float, float]:
        """Return this rank's sums, the seconds and those of a first step, which the former leave out; start anew.

        The sums are float64 [correct, z-loss a step, target tokens, tokens, tokens of the seconds].
        """
        seconds = time.perf_counter() - self._started - self._paused
        warm_up = self._warm_up
        counts = [self.targets, self.tokens, self.tokens - self._warm_up_tokens]
        sums = torch.stack([self._correct.double(), self._z_loss / max(self.steps, 1)])
        sums = torch.cat([sums, torch.tensor(counts, dtype=torch.float64, device=self.device)])
        self.reset()
        return sums, seconds, warm_up


class TokenClock(TrainerCallback):
    """Closes the log window wherever something depends on it, counts its steps and times the first ones apart.

    Args:
        window: What it closes.
        warm_up_steps: Steps of a process that are no measure of its speed.
    """

    def __init__(self, window: LogWindow, warm_up_steps: int) -> None:
        self.window = window
        self.warm_up_steps = warm_up_steps
        self._left = warm_up_steps

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the first window."""
        self.window.reset()
        self._left = self.warm_up_steps

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin the warm-up of a process's first steps."""
        if self._left:
            self.window.begin_warm_up()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the step, and ask for a log where something depends on it."""
        self.window.steps += 1
        if self._left:
            self.window.end_warm_up()
            self._left -= 1
        # A checkpoint then starts with an empty window, so that the logs after a resume are those of the unbroken run,
        # and an evaluation knows how many tokens came before it.
        if control.should_save or control.should_evaluate:
            control.should_log = True
