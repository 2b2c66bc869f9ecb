"""Shared memory in equal slots, through which worker processes hand over batches without copying them."""

from __future__ import annotations

import atexit
import math
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from itertools import count
from multiprocessing import reduction
from typing import Any, NamedTuple

import numpy as np
import torch

from fat5.data.collator import Allocate

_ALIGNMENT = 64
_TYPES = {"int64": torch.int64, "int32": torch.int32}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_POOLS: weakref.WeakValueDictionary[int, SlotPool] = weakref.WeakValueDictionary()
_NEXT_POOL = count()


@atexit.register
def _close_all() -> None:
    # Workers that answer no signal of their terminal must now answer the one that multiprocessing sends at exit.
    for pool in list(_POOLS.values()):
        pool.close()


class SlotPool:
    """Memory that this process and its workers map, cut into slots; this process alone says who may use which.

    It is an anonymous file in memory, so that neither the size of /dev/shm (64 MiB in a container) nor a killed process
    matters. Pages take up memory once they are written to.

    Args:
        slot_bytes: Bytes of a slot, rounded up to whole pages.
        num_slots: How many.
    """

    def __init__(self, slot_bytes: int, num_slots: int) -> None:
        self.slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.num_slots = num_slots
        descriptor = os.memfd_create("fat5-batches", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, self.slot_bytes * num_slots + 1)
        self._map(descriptor, next(_NEXT_POOL))
        self._free = deque(range(num_slots))
        self._owner = os.getpid()

    def _map(self, descriptor: int, key: int) -> None:
        self._descriptor = descriptor
        self._key = key
        weakref.finalize(self, os.close, descriptor)
        self._memory = memoryview(mmap.mmap(descriptor, self.slot_bytes * self.num_slots + 1))
        _POOLS[key] = self

    def __getstate__(self) -> dict[str, Any]:
        # Only a process that is just being started can take the file over.
        return {
            "slot_bytes": self.slot_bytes,
            "num_slots": self.num_slots,
            "key": self._key,
            "file": reduction.DupFd(self._descriptor),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.slot_bytes, self.num_slots = state["slot_bytes"], state["num_slots"]
        self._owner = -1
        self._map(state["file"].detach(), state["key"])

    def acquire(self) -> int | None:
        """Take a free slot, the one released last, whose memory is still warm; None if there is none."""
        return self._free.pop() if self._free else None

    def release(self, slot: int) -> None:
        """Give a slot back."""
        self._free.append(slot)

    @property
    def free_slots(self) -> int:
        """Number of slots that nobody uses."""
        return len(self._free)

    @property
    def closed(self) -> bool:
        """Whether the process that made the pool is ending; its workers see it, too."""
        return self._memory[-1] == 1

    def close(self) -> None:
        """Tell the workers that this process is ending; in a worker, of no effect."""
        if self._owner == os.getpid():
            self._memory[-1] = 1

    def bytes_of(self, slot: int) -> np.ndarray:
        """Return the slot's memory, a new uint8 array each time."""
        start = slot * self.slot_bytes
        return np.frombuffer(self._memory[start : start + self.slot_bytes], dtype=np.uint8)

    def write(self, slot: int, first: int, make: Callable[[Allocate], Mapping[str, Any]]) -> FilledSlot:
        """Let `make` build a batch, its large arrays inside the slot, and describe where it lies.

        Args:
            slot: The slot.
            first: Where the batch may begin, in bytes.
            make: Given a function that allocates int64 arrays in the slot, it returns the batch.
        """
        memory = self.bytes_of(slot)
        base = memory.ctypes.data
        end = first

        def place(size: int) -> int:
            nonlocal end
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + size
            return start

        def allocate(size: int) -> np.ndarray:
            start = place(8 * size)
            return memory[start : start + 8 * size].view(np.int64)

        entries: list[_Entry] = []
        values: dict[str, Any] = {}
        for name, value in make(allocate).items():
            if not isinstance(value, torch.Tensor):
                values[name] = value
                continue
            offset = value.data_ptr() - base
            if not 0 <= offset < self.slot_bytes:
                offset = place(value.nbytes)
                memory[offset : offset + value.nbytes] = value.numpy().reshape(-1).view(np.uint8)
            entries.append((name, offset, tuple(value.shape), _NAMES[value.dtype]))
        return FilledSlot(self._key, slot, end, entries, values)


_Entry = tuple[str, int, tuple[int, ...], str]
"""Name, offset in bytes, shape and type of a tensor; a plain tuple travels faster than one with names."""


class FilledSlot(NamedTuple):
    """A batch in a slot, as the worker that wrote it describes it; in the process of the pool it becomes a batch."""

    pool: int
    slot: int
    end: int
    entries: list[_Entry]
    values: dict[str, Any]

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return ArrivedBatch, tuple(self)


class ArrivedBatch:
    """A batch in a slot of this process. The slot is free again once this and all its tensors are gone."""

    def __init__(self, pool: int, slot: int, end: int, entries: list[_Entry], values: dict[str, Any]) -> None:
        self._entries = entries
        self._values = values
        owner = _POOLS[pool]
        self._memory: np.ndarray | None = owner.bytes_of(slot)[:end]
        # The views that tensors take of the array keep its base alive, not the array itself.
        weakref.finalize(self._memory.base, owner.release, slot).atexit = False
        self._pinned: torch.Tensor | None = None

    def pin_memory(self) -> ArrivedBatch:
        """Copy the batch to pinned memory; the pinning thread of a DataLoader calls this."""
        self._pinned = torch.from_numpy(self._memory).pin_memory()
        self._memory = None
        return self

    def batch(self) -> dict[str, Any]:
        """Return the batch; its tensors are views."""
        batch: dict[str, Any] = {}
        for name, offset, shape, dtype_name in self._entries:
            dtype = _TYPES[dtype_name]
            size = math.prod(shape)
            if self._pinned is not None:
                tensor = self._pinned[offset : offset + size * dtype.itemsize].view(dtype)
            else:
                tensor = torch.frombuffer(self._memory, dtype=dtype, count=size, offset=offset)
            batch[name] = tensor.view(shape) if len(shape) > 1 else tensor
        return {**batch, **self._values}
