"""A loader of streams that can be saved after any batch and taken up exactly there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fat5.data.shared_slots import SlotPool
from fat5.data.streaming_dataset import StreamingDataset, StreamStatistics, use_one_thread
from fat5.data.worker_processes import WORKER_LOSS, explained, leave_signals_to_parent
from fat5.errors import ConfigError, FAT5Error

_SNAPSHOT_EVERY = 8  # batches of a worker; a resumed one makes at most so many anew


_Result = tuple[dict[str, Any], "dict[str, Any] | None", StreamStatistics]
"""A batch, every so often a snapshot of the reader behind it, and what the reader has read."""


class StreamLoader:
    """Iterates over the batches of a `StreamingDataset` without end; made by `data_loader`.

    Every worker sends a snapshot of its reader along with every eighth batch. The state of the loader is the last
    snapshot of each worker that came with a batch given out, and the number of batches given out since. A new iteration
    goes on where the last one stood.

    Attributes:
        dataset: The data set.
    """

    def __init__(
        self,
        dataset: StreamingDataset,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int = 4,
        multiprocessing_context: str | None = None,
    ) -> None:
        self.dataset = dataset
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        self._prefetch_factor = prefetch_factor
        self._context = multiprocessing_context
        self._batches = 0
        self._snapshots: list[dict[str, Any] | None] = [None] * max(num_workers, 1)
        self._since = [0] * max(num_workers, 1)
        self._statistics = [StreamStatistics()] * max(num_workers, 1)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        readers = len(self._since)
        part = _Readers(self.dataset, list(self._snapshots), list(self._since), self._batches % readers)
        workers = self._num_workers
        loader = DataLoader(
            part,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=workers,
            pin_memory=self._pin_memory,
            prefetch_factor=self._prefetch_factor if workers else None,
            multiprocessing_context=self._context if workers else None,
            worker_init_fn=leave_signals_to_parent if workers else None,
            generator=torch.Generator(),
        )
        try:
            for result in loader:
                if isinstance(result, FAT5Error):
                    raise result
                batch, snapshot, statistics = result
                reader = self._batches % readers
                self._statistics[reader] = statistics
                self._batches += 1
                self._since[reader] += 1
                if snapshot is not None:
                    self._snapshots[reader], self._since[reader] = snapshot, 0
                yield batch
        except WORKER_LOSS as error:
            raise explained(error) from error

    @property
    def batches(self) -> int:
        """Batches given out, those before a resume included."""
        return self._batches

    def statistics(self) -> StreamStatistics:
        """Sum up what this rank's readers had read when they made the batches given out so far."""
        return sum(self._statistics, StreamStatistics())

    def state_dict(self) -> dict[str, Any]:
        """Return the state behind the last batch given out: numbers, texts and tensors, for `torch.save`."""
        return {
            "fingerprint": self.dataset.fingerprint,
            "rank": self.dataset.rank,
            "world_size": self.dataset.world_size,
            "num_workers": len(self._since),
            "batches": self._batches,
            "since": list(self._since),
            "statistics": [asdict(statistics) for statistics in self._statistics],
            "snapshots": [_converted(snapshot, np.ndarray, torch.tensor) for snapshot in self._snapshots],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the batch after which `state` was taken.

        Raises:
            ConfigError: It belongs to another rank, number of ranks or workers, or to other settings.
        """
        own = self.state_dict()
        for name, what in (
            ("rank", "this rank"),
            ("world_size", "the number of ranks"),
            ("num_workers", "the number of data workers"),
            ("fingerprint", "the fingerprint of sources, tokenizer and denoising settings"),
        ):
            if state[name] != own[name]:
                raise ConfigError(
                    f"the stream cannot go on exactly: {what} was {state[name]!r}, now {own[name]!r}; restore it"
                )
        self._batches = state["batches"]
        self._since = list(state["since"])
        self._statistics = [StreamStatistics(**statistics) for statistics in state["statistics"]]
        self._snapshots = [_converted(snapshot, torch.Tensor, torch.Tensor.numpy) for snapshot in state["snapshots"]]


class _Readers(IterableDataset):
    """What travels to the workers: the readers' states, and which reader the first worker is."""

    def __init__(
        self, dataset: StreamingDataset, snapshots: list[dict[str, Any] | None], since: list[int], first: int
    ) -> None:
        super().__init__()
        self._dataset, self._snapshots, self._since, self._first = dataset, snapshots, since, first
        # Workers read from it whether the main process is at its end.
        self.pool = SlotPool(0, 0)

    def __iter__(self) -> Iterator[_Result | FAT5Error]:
        info = get_worker_info()
        if info is not None:
            use_one_thread()
        try:
            yield from self._results(((info.id if info else 0) + self._first) % len(self._since))
        except FAT5Error as error:
            # As it is: a DataLoader would make a traceback of it.
            yield error

    def _results(self, number: int) -> Iterator[_Result]:
        reader = self._dataset.reader(number, len(self._since))
        snapshot = self._snapshots[number]
        if snapshot is not None:
            reader.load_state_dict(snapshot)
        for made, batch in enumerate(reader, start=1):
            if made > self._since[number]:
                snapshot = reader.state_dict() if made % _SNAPSHOT_EVERY == 0 else None
                yield batch, snapshot, reader.statistics()


def _as_it_is(result: Any) -> Any:
    return result


def _converted(value: Any, kind: type, convert: Any) -> Any:
    """Return a nested value with every member of type `kind` converted."""
    if isinstance(value, kind):
        return convert(value)
    if isinstance(value, dict):
        return {key: _converted(member, kind, convert) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_converted(member, kind, convert) for member in value]
    return value
