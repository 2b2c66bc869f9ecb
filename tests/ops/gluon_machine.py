"""The machine on which `gluon_emulator` runs kernels: registers, memory, barriers, and warp groups that take turns."""

from __future__ import annotations

import random
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class HazardError(AssertionError):
    """Something that is undefined on the device."""


class Values(torch.Tensor):
    """A tensor in registers; it has a type with a layout that means nothing here."""

    type = types.SimpleNamespace(layout=None)


def values(x: Tensor) -> Values:
    return x.as_subclass(Values)


class Number(int):
    """A scalar that can be cast."""

    def to(self, dtype: torch.dtype) -> Number:
        return self


class Pointer:
    """Elements of a flat tensor, at one offset or many."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offset + more)

    def __sub__(self, less: Any) -> Pointer:
        return Pointer(self.memory, self.offset - less)

    def cast(self, pointer_type: torch.dtype) -> Pointer:
        ratio = self.memory.element_size() // torch.empty(0, dtype=pointer_type).element_size()
        return Pointer(self.memory.view(pointer_type), self.offset * ratio)

    def to(self, dtype: torch.dtype) -> Address:
        return Address(self.memory, self.offset * self.memory.element_size())

    def load(self, mask: Any = None, other: Any = 0) -> Any:
        if not isinstance(self.offset, torch.Tensor):
            if not 0 <= self.offset < self.memory.numel():
                raise HazardError(f"load at {self.offset} of {self.memory.numel()} elements")
            return self.memory[self.offset].item()
        inside = torch.ones_like(self.offset, dtype=torch.bool) if mask is None else mask
        check_bounds(self.offset[inside], self.memory)
        found = self.memory[torch.where(inside, self.offset, 0)]
        return values(torch.where(inside, found, torch.as_tensor(other, dtype=found.dtype)))

    def store(self, value: Tensor, mask: Any = None) -> None:
        inside = torch.ones_like(self.offset, dtype=torch.bool) if mask is None else mask
        check_bounds(self.offset[inside], self.memory)
        self.memory[self.offset[inside]] = value[inside].to(self.memory.dtype)


class Address:
    """Bytes from the start of a flat tensor, as the inline assembly sees a pointer."""

    def __init__(self, memory: Tensor, offset: Any) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, more: Any) -> Address:
        return Address(self.memory, self.offset + more)


def check_bounds(offsets: Tensor, memory: Tensor) -> None:
    if offsets.numel() and not 0 <= int(offsets.min()) <= int(offsets.max()) < memory.numel():
        raise HazardError(f"access to {int(offsets.min())}..{int(offsets.max())} of {memory.numel()} elements")


class Shared:
    """A buffer in shared memory, or a view of one."""

    def __init__(self, memory: Tensor, root: Tensor, parts: frozenset[int], each: int = 1) -> None:
        self.memory, self.root, self.parts, self.each = memory, root, parts, each

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    @staticmethod
    def allocate(dtype: torch.dtype, shape: list[int], layout: Any = None) -> Shared:
        memory = torch.full(shape, torch.nan, dtype=dtype)
        return Shared(memory, memory, frozenset(range(shape[0])))

    def index(self, i: int) -> Shared:
        if not 0 <= i < self.memory.shape[0]:
            raise HazardError(f"buffer {i} of {self.memory.shape[0]}")
        return Shared(self.memory[i], self.root, frozenset(range(i * self.each, (i + 1) * self.each)))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.memory.narrow(dim, start, length), self.root, self.parts)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.memory.permute(order), self.root, self.parts)

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.memory.view(shape), self.root, self.parts)

    def reinterpret(self, dtype: torch.dtype, shape: list[int]) -> Shared:
        memory = self.memory.view(-1).view(dtype).view(shape)
        return Shared(memory, self.root, self.parts, self.root.shape[0] // shape[0])

    def overlaps(self, other: Shared) -> bool:
        return self.root is other.root and bool(self.parts & other.parts)

    def load(self, layout: Any) -> Values:
        NOW.machine.reads(self)
        return values(self.memory.clone())

    def store(self, value: Tensor) -> None:
        NOW.machine.writes_inside(self)
        assert value.shape == self.memory.shape
        assert value.dtype == self.memory.dtype
        self.memory.copy_(value)


class Barrier:
    """An mbarrier: opens when all have arrived and all announced bytes have come."""

    def __init__(self, count: int) -> None:
        self.count, self.pending, self.bytes, self.phase = count, count, 0, 0

    def settle(self) -> None:
        if self.pending < 0:
            raise HazardError("more arrivals at a barrier than it counts")
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase ^ 1

    def arrive(self, count: int = 1) -> None:
        self.pending -= count
        self.settle()


class Descriptor:
    """A host's TMA descriptor: box and strides of a tensor, with the hardware's bounds."""

    def __init__(self, host: Any) -> None:
        self.dtype, self.block_shape, self.layout = host.base.dtype, list(host.block_shape), host.layout
        self.shape, self.strides, self.base = host.shape, host.strides, host.base
        storage = host.base.untyped_storage()
        self.memory = torch.empty(0, dtype=self.dtype).set_(storage, 0, (storage.nbytes() // self.dtype.itemsize,))

    def places(self, coordinates: list[int]) -> tuple[Tensor, Tensor]:
        """Return where in the storage the box's elements lie, and which are within bounds."""
        grids = torch.meshgrid(*(torch.arange(n) for n in self.block_shape), indexing="ij")
        inside = torch.ones(self.block_shape, dtype=torch.bool)
        start = 0
        place = torch.zeros(self.block_shape, dtype=torch.int64)
        for c, grid, size, stride in zip(coordinates, grids, self.shape, self.strides, strict=True):
            assert -(2**31) <= c < 2**31
            inside &= (grid + c >= 0) & (grid + c < size)
            start += c * stride * self.dtype.itemsize
            if grid.any():
                place += grid * stride
        start = (start + 2**63) % 2**64 - 2**63  # addresses have 64 bits
        place += self.base.storage_offset() + start // self.dtype.itemsize
        check_bounds(place[inside], self.memory)
        return torch.where(inside, place, 0), inside


class Pending:
    """The result of a matrix product under way."""

    def __init__(self, value: Tensor, number: int) -> None:
        self.value, self.number = value, number


class Machine:
    """One program: its warp groups, what is under way, and whose turn it is."""

    def __init__(self, seed: int, program: int, programs: int) -> None:
        self.random = random.Random(seed)
        self.program, self.programs = program, programs
        self.background: list[tuple[str, int, Shared, Callable[[], None]]] = []  # kind, warp group, buffer, effect
        self.products: dict[int, list[tuple[int, list[Shared]]]] = {}
        self.issued: dict[int, int] = {}
        self.waiting: dict[int, Callable[[], bool]] = {}
        self.turns: dict[int, threading.Semaphore] = {}
        self.finished = threading.Semaphore(0)
        self.failure: BaseException | None = None
        self.unfenced: list[tuple[int | None, Shared]] = []  # written, and not yet to be seen by copies and products
        self.sources: dict[int, list[tuple[int, Shared]]] = {}  # stores since a group's last wait for them
        self.told: list[tuple[int, Shared]] = []  # read by them, as one thread of the group alone knows
        self.local = threading.local()

    @property
    def group(self) -> int:
        return self.local.group

    def fence(self) -> None:
        group = getattr(self.local, "group", None)
        self.unfenced = [item for item in self.unfenced if item[0] != group]

    def tell(self) -> None:
        """Bring a group's threads together: all know now that its stores have read what they waited for."""
        self.told = [item for item in self.told if item[0] != self.group]

    def reads_outside(self, buffer: Shared) -> None:
        """Read by the copy engine or a matrix product."""
        if any(other.overlaps(buffer) for _, other in self.unfenced):
            raise HazardError("shared memory read by a copy or a product before a fence")
        self.reads(buffer)

    def reads(self, buffer: Shared) -> None:
        for kind, _, other, _ in self.background:
            if kind == "load" and other.overlaps(buffer):
                raise HazardError("shared memory read while a load is under way")

    def writes(self, buffer: Shared) -> None:
        for _, _, other, _ in self.background:
            if other.overlaps(buffer):
                raise HazardError("shared memory written while a copy is under way")
        for products in self.products.values():
            if any(operand.overlaps(buffer) for _, operands in products for operand in operands):
                raise HazardError("shared memory written while a matrix product reads it")

    def writes_inside(self, buffer: Shared) -> None:
        """Write from registers."""
        self.writes(buffer)
        if any(other.overlaps(buffer) for _, other in self.told):
            raise HazardError("shared memory written by threads that do not know of a store's end")
        self.unfenced.append((getattr(self.local, "group", None), buffer))

    def start(self, kind: str, buffer: Shared, effect: Callable[[], None]) -> None:
        if kind == "load":
            self.writes(buffer)
            buffer.memory.fill_(torch.nan)
        else:
            self.reads_outside(buffer)
            self.sources.setdefault(self.group, []).append((self.group, buffer))
        self.background.append((kind, self.group, buffer, effect))
        self.switch(lambda: True)

    def complete(self, index: int) -> None:
        self.background.pop(index)[3]()

    def drain(self, group: int) -> None:
        """Finish the stores of a warp group, as the one thread that started them waits for."""
        for index in reversed(range(len(self.background))):
            if self.background[index][:2] == ("store", group):
                self.complete(index)
        self.told += self.sources.pop(group, [])

    def switch(self, ready: Callable[[], bool]) -> None:
        """Let others run; come back once `ready`."""
        group = self.group
        self.waiting[group] = ready
        self.hand_over()
        self.turns[group].acquire()
        if self.failure is not None:
            raise SystemExit

    def hand_over(self) -> None:
        while True:
            able = [g for g, ready in self.waiting.items() if ready()]
            choices = len(able) + len(self.background)
            if choices == 0:
                if self.waiting:
                    self.failure = self.failure or HazardError(f"deadlock of warp groups {sorted(self.waiting)}")
                    for turn in self.turns.values():
                        turn.release()
                self.finished.release()
                return
            pick = self.random.randrange(choices)
            if pick >= len(able):
                self.complete(pick - len(able))
                continue
            del self.waiting[able[pick]]
            self.turns[able[pick]].release()
            return

    def specialize(self, functions: list, worker_warps: list[int], worker_registers: list[int]) -> None:
        def run(group: int, function: Callable, arguments: tuple) -> None:
            self.local.group = group
            self.turns[group].acquire()
            try:
                if self.failure is None:
                    function(*arguments)
                    self.drain(group)
            except BaseException as error:
                self.failure = self.failure or error
            self.turns.pop(group)
            if self.failure is None:
                self.hand_over()
            else:
                for turn in self.turns.values():
                    turn.release()
                self.finished.release()

        threads = []
        for group, (function, arguments) in enumerate(functions):
            self.turns[group], self.waiting[group] = threading.Semaphore(0), lambda: True
            self.products[group], self.issued[group] = [], 0
            threads.append(threading.Thread(target=run, args=(group, function, arguments), daemon=True))
        for thread in threads:
            thread.start()
        self.hand_over()
        self.finished.acquire()
        for thread in threads:
            thread.join(30)
        if self.failure is not None:
            raise self.failure
        if any(self.products.values()):
            raise HazardError("a matrix product that nobody waited for")


NOW = types.SimpleNamespace(machine=None)  # the program that runs
