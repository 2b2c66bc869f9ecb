"""Where the tokens of a plan's windows lie: in the documents of a corpus, or in rows cut from them end to end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from fat5.data.jit import jit, read_only
from fat5.data.packing import BatchPlan
from fat5.data.packing_kernels import row_pieces

WindowPlaces = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Indices of windows in the plan, the buffer that holds their tokens, and the first token of each in it, int64."""


class TokenSource(Protocol):
    """What the data pipeline needs of a data set of token ids; `fat5.data.token_dataset.TokenDataset` is one."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]."""

    def flat_shards(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Shards in document order: token ids end to end, and the documents' offsets into them."""


class WindowTokens(Protocol):
    """Finds the tokens of windows."""

    def locate(self, plan: BatchPlan) -> Iterator[WindowPlaces]:
        """Yield where the tokens of the plan's windows lie, in a few groups."""


class StoredWindows:
    """Windows that lie each inside one document."""

    def __init__(self, source: TokenSource) -> None:
        self._shards = [(read_only(tokens), offsets) for tokens, offsets in source.flat_shards()]
        self._first_documents = np.cumsum([0, *(len(offsets) - 1 for _, offsets in self._shards)])

    def locate(self, plan: BatchPlan) -> Iterator[WindowPlaces]:
        """Yield one group for each shard that the plan touches."""
        return self.places(plan.document, plan.start)

    def places(self, document: np.ndarray, start: np.ndarray) -> Iterator[WindowPlaces]:
        """Yield the places of stretches that begin at token `start` of `document`."""
        shards = np.searchsorted(self._first_documents, document, side="right") - 1
        for shard in np.unique(shards):
            tokens, offsets = self._shards[shard]
            here = np.flatnonzero(shards == shard)
            yield here, tokens, offsets[document[here] - self._first_documents[shard]].astype(np.int64) + start[here]


class ConcatenatedWindows:
    """Rows of documents end to end, as `fat5.data.packing.Planner` cuts them with `concatenate`.

    Args:
        source: The documents.
        seed: As the planner's.
        shuffle: As the planner's.
    """

    def __init__(self, source: TokenSource, *, seed: int, shuffle: bool) -> None:
        self._stored = StoredWindows(source)
        self._lengths = read_only(source.lengths, np.int64)
        self._seed = seed
        self._shuffle = shuffle

    def locate(self, plan: BatchPlan) -> Iterator[WindowPlaces]:
        """Yield one group: the rows, copied together."""
        total = int(plan.length.sum())
        pieces = np.empty((3, total), dtype=np.int64)
        count = row_pieces(
            self._lengths,
            self._shuffle,
            self._seed,
            plan.epoch,
            plan.position,
            plan.start,
            plan.length,
            pieces,
        )
        document, start, length = pieces[:, :count]
        ends = np.cumsum(length)
        row_tokens = np.empty(total, dtype=np.uint32)
        for here, tokens, position in self._stored.places(document, start):
            _copy_pieces(tokens, position, length[here], (ends - length)[here], row_tokens)
        yield np.arange(len(plan.length)), read_only(row_tokens), np.cumsum(plan.length) - plan.length


@jit
def _copy_pieces(
    tokens: np.ndarray, position: np.ndarray, length: np.ndarray, target: np.ndarray, row_tokens: np.ndarray
) -> None:
    for piece in range(len(length)):
        for place in range(length[piece]):
            row_tokens[target[piece] + place] = tokens[position[piece] + place]
