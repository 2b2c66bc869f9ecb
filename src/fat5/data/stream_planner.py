"""Planning and collation of documents that come in chunks, by the same engine as for a stored corpus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from fat5.data import packing_kernels as kernels
from fat5.data.jit import read_only
from fat5.data.packing import BatchPlan, Budgets, Planner
from fat5.data.spans import SpanTable
from fat5.data.window_tokens import WindowPlaces


class Chunk(NamedTuple):
    """Tokenised documents: flat token ids, and the documents' offsets into them, int64 [documents + 1]."""

    tokens: np.ndarray
    offsets: np.ndarray


class StreamPlanner(Planner):
    """A planner whose documents come in chunks. Chunk number n counts as epoch n, and is read in its own order.

    Args:
        table: Lengths of the noised sides.
        budgets: Sizes of a batch.
        seed: Seed of the denoisers.
    """

    def __init__(self, table: SpanTable, budgets: Budgets, *, seed: int) -> None:
        super().__init__(np.array([2]), table, budgets, seed=seed, shuffle=False, epochs=0)
        self._chunks: dict[int, Chunk] = {}

    @property
    def needs_chunk(self) -> bool:
        """Whether the next batch needs more documents than there are, so that packing has its full choice."""
        cursor = self._state.cursor
        used_up = cursor[kernels.NEXT_EPOCH] == self._rules.num_epochs
        return bool(used_up and cursor[kernels.WAITING] < len(self._state.pool))

    def add_chunk(self, chunk: Chunk) -> None:
        """Take the documents of the next chunk."""
        number = self._rules.num_epochs
        self._chunks[number] = Chunk(read_only(chunk.tokens), chunk.offsets)
        self._open(number)
        kernels.refill(self._lengths, self._rules, self._state)

    def next_batch(self) -> BatchPlan:
        """Plan the next batch from the windows at hand; `needs_chunk` must be False."""
        size = kernels.fill_batch(self._rules, self._state, self._plan)
        plan = BatchPlan(*self._plan[:size].T.copy())
        kernels.refill(self._lengths, self._rules, self._state)
        return plan

    def locate(self, plan: BatchPlan) -> Iterator[WindowPlaces]:
        """Yield where the tokens of the plan's windows lie, chunk by chunk."""
        for number in np.unique(plan.epoch):
            here = np.flatnonzero(plan.epoch == number)
            tokens, offsets = self._chunks[int(number)]
            yield here, tokens, offsets[plan.document[here]] + plan.start[here]

    def drop_used_chunks(self) -> None:
        """Forget the chunks that no waiting window and no unread document needs; call it after `locate`."""
        waiting = self._state.pool[: self._state.cursor[kernels.WAITING], kernels.EPOCH]
        needed = {int(number) for number in np.unique(waiting)} | {self._rules.num_epochs - 1}
        self._chunks = {number: chunk for number, chunk in self._chunks.items() if number in needed}

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the memory and the chunks that are needed yet."""
        self.drop_used_chunks()
        chunks = {str(number): tuple(chunk) for number, chunk in self._chunks.items()}
        return {"memory": super().state_dict(), "chunks": chunks, "num_chunks": self._rules.num_epochs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict` taken by a planner with equal arguments."""
        super().load_state_dict(state["memory"])
        self._chunks = {
            int(number): Chunk(read_only(tokens), offsets) for number, (tokens, offsets) in state["chunks"].items()
        }
        if state["num_chunks"]:
            self._open(state["num_chunks"] - 1)

    def _open(self, number: int) -> None:
        self._lengths = read_only(np.diff(self._chunks[number].offsets), np.int64)
        self._rules = self._rules._replace(num_epochs=number + 1)
