"""Greedy search whose every step stays on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fat5.models.step_cache import StepCache
from fat5.ops.step.choice import Rows, choose_next

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
            places, lengths = torch.zeros(2, rows, dtype=torch.int64, device=device)
            self._rows = Rows(
                tokens=cache.tokens,
                sequences=torch.zeros(rows, cache.shape.target_length + 1, dtype=torch.int64, device=device),
                places=places,
                lengths=lengths,
                ended=torch.zeros(rows, dtype=torch.bool, device=device),
            )
            self._eos = torch.tensor(settings.eos_token_ids, dtype=torch.int64, device=device)

    def step(self, model: FAT5ForConditionalGeneration) -> Tensor:
        """Choose the token after the cache's `tokens`, which takes their place; return the logits."""
        logits = self.cache.forward(model)
        choose_next(logits, self._rows, self._eos, self.settings.pad_token_id, backend=model.config.kernel_backend)
        return logits

    def run(self, model: FAT5ForConditionalGeneration, prompt: Tensor, max_length: int) -> Tensor:
        """Return the prompt [rows, n] and what follows, until all rows have ended or are `max_length` long."""
        length = prompt.shape[1]
        self._rows.sequences[:, :length] = prompt
        self._rows.places.fill_(length)
        self._rows.lengths.zero_()
        self._rows.ended.zero_()
        if length > 1:
            self.cache.decode(model, prompt[:, :-1])
        self.cache.tokens.copy_(prompt[:, -1:])
        look = _LateLook(self._rows.ended)
        for number in range(1, max_length - length + 1):
            if self.cache.is_captured:
                self.cache.replay()
            else:
                self.step(model)
            if self.settings.eos_token_ids and number % _CHECK_EVERY == 0 and not look():
                break
        return self._rows.sequences[:, : length + int(self._rows.lengths.max())].clone()


class _LateLook:
    """Tells whether a row still runs, as of the last look, so that the host never waits for the steps it queues."""

    def __init__(self, ended: Tensor) -> None:
        self._ended = ended
        self._on_gpu = ended.is_cuda
        self._seen = torch.zeros(ended.shape, dtype=torch.bool, pin_memory=self._on_gpu)
        self._copied = torch.cuda.Event() if self._on_gpu else None

    def __call__(self) -> bool:
        if self._copied is None:
            return not self._ended.all()
        self._copied.synchronize()
        running = not self._seen.all()
        self._seen.copy_(self._ended, non_blocking=True)
        self._copied.record(torch.cuda.current_stream(self._ended.device))
        return running
