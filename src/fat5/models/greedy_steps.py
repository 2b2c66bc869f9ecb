"""Greedy search whose every step stays on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fat5.models.step_cache import StepCache

if TYPE_CHECKING:
    from fat5.models.modeling import FAT5ForConditionalGeneration

_CHECK_EVERY = 8  # steps between two looks at whether all rows have ended


@dataclass
class Steps:
    """Steps of a decoder over a cache of fixed addresses, for a loop that chooses the tokens itself."""

    cache: StepCache

    def step(self, model: FAT5ForConditionalGeneration) -> Tensor:
        """Return the logits that follow the cache's `tokens`."""
        return self.cache.forward(model)


@dataclass(frozen=True)
class GreedySettings:
    """What greedy search depends on.

    Attributes:
        eos_token_ids: Tokens that end a row; none for rows that all have the greatest length.
        pad_token_id: What follows in rows that have ended before others.
    """

    eos_token_ids: tuple[int, ...]
    pad_token_id: int


class GreedySteps(Steps):
    """Steps that choose the most likely token, and note it, ended rows and their own number on the device.

    Args:
        cache: The cache.
        settings: When rows end.
    """

    def __init__(self, cache: StepCache, settings: GreedySettings) -> None:
        super().__init__(cache)
        self.settings = settings
        rows, device = cache.tokens.shape[0], cache.tokens.device
        with torch.inference_mode(False):  # the buffers outlive the call
            self._sequences = torch.zeros(rows, cache.shape.target_length + 1, dtype=torch.int64, device=device)
            self._place = torch.zeros(1, dtype=torch.int64, device=device)
            self._ended = torch.zeros(rows, 1, dtype=torch.bool, device=device)
            self._running = torch.ones((), dtype=torch.bool, device=device)
            self._count = torch.zeros((), dtype=torch.int64, device=device)
            self._eos = torch.tensor(settings.eos_token_ids, dtype=torch.int64, device=device)

    def step(self, model: FAT5ForConditionalGeneration) -> Tensor:
        """Choose the token after the cache's `tokens`, which takes their place; return the logits."""
        logits = self.cache.forward(model)
        # Ties are broken as Transformers breaks them, in float32.
        chosen = logits.float().argmax(-1, keepdim=True)
        if self.settings.eos_token_ids:
            chosen = chosen.masked_fill(self._ended, self.settings.pad_token_id)
            self._ended |= (chosen == self._eos).any(-1, keepdim=True)
        self._sequences.index_copy_(1, self._place, chosen)
        self._place += 1
        self.cache.tokens.copy_(chosen)
        self._count += self._running
        torch.logical_not(self._ended.all(), out=self._running)
        return logits

    def run(self, model: FAT5ForConditionalGeneration, prompt: Tensor, max_length: int) -> Tensor:
        """Return the prompt [rows, n] and what follows, until all rows have ended or are `max_length` long."""
        length = prompt.shape[1]
        self._sequences[:, :length] = prompt
        self._place.fill_(length)
        self._ended.zero_()
        self._running.fill_(True)
        self._count.zero_()
        if length > 1:
            self.cache.decode(model, prompt[:, :-1])
        self.cache.tokens.copy_(prompt[:, -1:])
        look = _LateLook(self._running)
        for number in range(1, max_length - length + 1):
            if self.cache.is_captured:
                self.cache.replay()
            else:
                self.step(model)
            if self.settings.eos_token_ids and number % _CHECK_EVERY == 0 and not look():
                break
        return self._sequences[:, : length + int(self._count)].clone()


class _LateLook:
    """Reads a flag of the device as it was at the last look, so that the host never waits for the steps it queues."""

    def __init__(self, flag: Tensor) -> None:
        self._flag = flag
        self._on_gpu = flag.is_cuda
        self._seen = torch.ones((), dtype=torch.bool, pin_memory=self._on_gpu)
        self._copied = torch.cuda.Event() if self._on_gpu else None

    def __call__(self) -> bool:
        if self._copied is None:
            return bool(self._flag)
        self._copied.synchronize()
        seen = bool(self._seen)
        self._seen.copy_(self._flag, non_blocking=True)
        self._copied.record(torch.cuda.current_stream(self._flag.device))
        return seen
