"""The loader of training and evaluation: batches made by worker processes, in the order in which one would make them.

The plan is made once, in this process; a worker gets the plans of a few batches at a time and writes them into shared
memory. So workers hold no state, their number changes nothing, and the more there are the more batches come.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Sequence
from itertools import islice
from typing import Any, overload

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from fat5.data.collator import DenoisingCollator
from fat5.data.denoising_dataset import DenoisingDataset
from fat5.data.packing import BatchPlan
from fat5.data.shared_slots import ArrivedBatch, FilledSlot, SlotPool
from fat5.data.stream_loader import StreamLoader
from fat5.data.streaming_dataset import StreamingDataset
from fat5.data.worker_processes import WORKER_LOSS, explained, leave_signals_to_parent
from fat5.errors import ConfigError

_MESSAGE_BYTES = 1 << 22
_MOST_BATCHES_A_MESSAGE = 8
_SPARE_BATCHES = 8  # held by the consumer, such as those of gradient accumulation


class BatchLoader:
    """Iterates over the batches of a `DenoisingDataset`; made by `data_loader`.

    Attributes:
        dataset: The data set.
    """

    def __init__(
        self,
        dataset: DenoisingDataset,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int = 4,
        persistent_workers: bool = False,
        multiprocessing_context: str | None = None,
    ) -> None:
        self.dataset = dataset
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        self._prefetch_factor = prefetch_factor
        self._persistent_workers = persistent_workers
        self._context = multiprocessing_context
        self._workers: DataLoader | None = None
        self._iterations: weakref.WeakSet[Any] = weakref.WeakSet()

    def __len__(self) -> int:
        """Batches of the data set.

        Raises:
            TypeError: The stream has no end.
        """
        return len(self.dataset)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        iteration = self._batches()
        self._iterations.add(iteration)
        return iteration

    def close(self) -> None:
        """End the workers and all iterations under way; happens by itself where these are given up, or at exit."""
        for iteration in list(self._iterations):
            iteration.close()
        self._workers = None

    def _batches(self) -> Generator[dict[str, Any], None, None]:
        if self._num_workers == 0:
            # Its own generator: starting a loader must not move the global one, or dropout differs after a resume.
            yield from DataLoader(
                self.dataset, batch_size=None, pin_memory=self._pin_memory, generator=torch.Generator()
            )
            return
        workers = self._start() if self._workers is None else self._workers
        if self._persistent_workers:
            self._workers = workers
        try:
            for arrived in workers:
                while arrived:
                    # Popped, so that the slot is free again as soon as the consumer has done with the batch.
                    batch = arrived.pop(0)
                    yield batch.batch() if isinstance(batch, ArrivedBatch) else batch
                    del batch
        except WORKER_LOSS as error:
            raise explained(error) from error

    def _start(self) -> DataLoader:
        batch_bytes = self.dataset.batch_bytes
        in_message = max(1, min(_MOST_BATCHES_A_MESSAGE, _MESSAGE_BYTES // batch_bytes))
        # Two at least: a worker writes the next one while the last waits to be read.
        messages = max(2, -(-self._prefetch_factor // in_message))
        prepared = in_message * (self._num_workers * messages + 1)
        pool = SlotPool(_plan_bytes(self.dataset) + batch_bytes, prepared + _SPARE_BATCHES)
        return DataLoader(
            _PlannedBatches(self.dataset, pool),
            batch_sampler=_Tasks(self.dataset, pool, in_message),
            collate_fn=_as_it_is,
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            prefetch_factor=messages,
            persistent_workers=self._persistent_workers,
            multiprocessing_context=self._context,
            worker_init_fn=leave_signals_to_parent,
            generator=torch.Generator(),  # as above
        )


@overload
def data_loader(
    dataset: DenoisingDataset,
    *,
    num_workers: int = 0,
    pin_memory: bool = False,
    prefetch_factor: int = 4,
    persistent_workers: bool = False,
    multiprocessing_context: str | None = None,
) -> BatchLoader: ...


@overload
def data_loader(
    dataset: StreamingDataset,
    *,
    num_workers: int = 0,
    pin_memory: bool = False,
    prefetch_factor: int = 4,
    persistent_workers: bool = False,
    multiprocessing_context: str | None = None,
) -> StreamLoader: ...


def data_loader(
    dataset: DenoisingDataset | StreamingDataset,
    *,
    num_workers: int = 0,
    pin_memory: bool = False,
    prefetch_factor: int = 4,
    persistent_workers: bool = False,
    multiprocessing_context: str | None = None,
) -> BatchLoader | StreamLoader:
    """Return a loader of the data set's batches.

    The batches of a `DenoisingDataset` are the same whatever the number of workers, and begin at its `start_batch`. In
    those of a `StreamingDataset` the number of workers has a part, and its loader has `state_dict` and
    `load_state_dict`.

    Args:
        dataset: The stream.
        num_workers: Processes that make batches; 0 makes them in this process.
        pin_memory: Whether the tensors lie in pinned memory, for an asynchronous copy to the GPU.
        prefetch_factor: Batches that each worker prepares ahead, at least.
        persistent_workers: Keep the workers for the next iteration; a stream, which has no end, has but one.
        multiprocessing_context: How workers start ("fork", "spawn", "forkserver"); None for Python's choice.

    Raises:
        ConfigError: A number is out of range.
        DataError: While iterating: a worker process died, or a source of a stream is damaged.
    """
    for name, value, least in (("num_workers", num_workers, 0), ("prefetch_factor", prefetch_factor, 1)):
        if value < least:
            raise ConfigError(f"{name} must be {least} or more, got {value}")
    settings: dict[str, Any] = {
        "num_workers": num_workers,
        "pin_memory": pin_memory,
        "prefetch_factor": prefetch_factor,
        "multiprocessing_context": multiprocessing_context,
    }
    if isinstance(dataset, StreamingDataset):
        return StreamLoader(dataset, **settings)
    return BatchLoader(dataset, persistent_workers=persistent_workers, **settings)


_Task = tuple[int, int, BatchPlan | None]
"""A batch to make: the slot where its plan stands and the batch is to go, its windows, and the plan if without slot."""


class _Tasks:
    """Plans the batches, a few a message; the DataLoader takes it for a batch sampler."""

    def __init__(self, dataset: DenoisingDataset, pool: SlotPool, in_message: int) -> None:
        self._dataset, self._pool, self._in_message = dataset, pool, in_message

    def __iter__(self) -> Iterator[list[_Task]]:
        plans = self._dataset.plans()
        while tasks := [self._task(plan) for plan in islice(plans, self._in_message)]:
            yield tasks

    def _task(self, plan: BatchPlan) -> _Task:
        slot = self._pool.acquire()
        windows = len(plan.document)
        if slot is None:
            # The consumer keeps more batches than expected: this one travels through the pipe.
            return -1, windows, plan
        columns = self._pool.bytes_of(slot)[: 8 * windows * len(plan)].view(np.int64).reshape(len(plan), windows)
        for column, values in zip(columns, plan, strict=True):
            column[:] = values
        return slot, windows, None


class _PlannedBatches(Dataset):
    """Makes the batches of tasks, in a worker."""

    def __init__(self, dataset: DenoisingDataset, pool: SlotPool) -> None:
        self._dataset, self.pool = dataset, pool
        self._collate: DenoisingCollator | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_collate": None}

    def __getitems__(self, tasks: Sequence[_Task]) -> list[FilledSlot | dict[str, Any]]:
        if self._collate is None:
            self._collate = self._dataset.collator()
        return [self._make(task, self._collate) for task in tasks]

    def _make(self, task: _Task, collate: DenoisingCollator) -> FilledSlot | dict[str, Any]:
        slot, windows, plan = task
        if plan is not None:
            return collate(plan)
        size = len(BatchPlan._fields)
        columns = BatchPlan(*self.pool.bytes_of(slot)[: 8 * windows * size].view(np.int64).reshape(size, windows))
        return self.pool.write(slot, _plan_bytes(self._dataset), lambda allocate: collate(columns, allocate))


def _plan_bytes(dataset: DenoisingDataset) -> int:
    return 8 * len(BatchPlan._fields) * dataset.budgets.max_documents


def _as_it_is(batches: list[Any]) -> list[Any]:
    return batches
