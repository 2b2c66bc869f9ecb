"""Kernels that need nothing of each other, side by side: each fills the multiprocessors that the other's end leaves."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch
from torch import Tensor

from fat5.ops.attention.autotune import autotuning


class SideStream:
    """A second stream beside the current one, until the `with` block ends; where there is none, the current one itself.

    What is launched under `launches` waits for what the current stream has been given so far, and what the current
    stream is given after the block waits for it. Memory stays the current stream's: allocate outside `launches`, and
    pass what nobody else holds until the end of the block. Captured by a CUDA graph, it becomes a branch.

    Args:
        device: Of both streams.
    """

    def __init__(self, device: torch.device) -> None:
        # Kernels that are timed one by one must have the card for themselves.
        alone = device.type != "cuda" or autotuning()
        self._streams = None if alone else (torch.cuda.current_stream(device), _second_stream(device))
        self._held: list[Tensor | None] = []

    def __enter__(self) -> SideStream:
        return self

    def launches(self, *read: Tensor | None) -> AbstractContextManager[None]:
        """Return a context in which launches go to the second stream; `read` are tensors to hold till the end."""
        if self._streams is None:
            return nullcontext()
        current, second = self._streams
        self._held += read
        second.wait_stream(current)
        return torch.cuda.stream(second)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._streams is not None:
            current, second = self._streams
            current.wait_stream(second)
        self._held.clear()


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
