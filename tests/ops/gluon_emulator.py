"""Runs the Gluon kernels of `fat5.ops.attention.hopper` on a CPU: their own code, statement by statement, in PyTorch.

Gluon has no interpreter. This one runs each warp group of a program as a thread, one at a time, and switches between
them at random wherever the hardware could: so the kernels' index arithmetic, masks, tails and barrier phases are
executed as they stand. It fails on what a GPU would only sometimes show:

- a deadlock, or a barrier that opens too often;
- shared memory written while a TMA store or a matrix product still reads it, or read while a TMA load is under way;
- the result of a matrix product used before a wait that covers it;
- shared memory written from registers and read by a copy or a product without a fence between;
- shared memory written again after a wait for stores, which one thread does, without a barrier of the group's threads.

TMA descriptors are the host's own, with 64-bit addresses that wrap and bounds for each dimension. What it cannot show:
layouts in shared memory, other races inside a warp group, and faults of the compiler.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from triton.experimental.gluon.language import constexpr
from triton.runtime.jit import JITFunction

from fat5.ops.attention.hopper import backward, forward, forward_steps, query_gradient, tile
from tests.ops.gluon_machine import (
    NOW,
    Barrier,
    Descriptor,
    HazardError,
    Machine,
    Number,
    Pending,
    Pointer,
    Shared,
    check_bounds,
    values,
)


def _product(a, b, acc, *, use_acc=True, is_async=False):
    machine, group = NOW.machine, NOW.machine.group
    operands = [x for x in (a, b) if isinstance(x, Shared)]
    for operand in operands:
        machine.reads_outside(operand)
    left, right = (x.memory if isinstance(x, Shared) else x for x in (a, b))
    assert left.dtype == right.dtype
    total = acc.value if isinstance(acc, Pending) else acc
    result = left.float() @ right.float() + (total if use_acc else 0)
    assert result.shape == total.shape
    machine.issued[group] += 1
    machine.products[group].append((machine.issued[group], operands))
    machine.switch(lambda: True)
    return Pending(values(result), machine.issued[group])


def _product_wait(left_over, deps):
    machine, group = NOW.machine, NOW.machine.group
    products = machine.products[group]
    products[:] = products[len(products) - left_over :] if left_over and len(products) > left_over else (
        products if left_over else []
    )  # fmt: skip
    running = {number for number, _ in products}
    done = []
    for dep in deps:
        if isinstance(dep, Pending) and dep.number in running:
            raise HazardError("the result of a matrix product used before it was waited for")
        done.append(dep.value if isinstance(dep, Pending) else dep)
    return done[0] if len(done) == 1 else tuple(done)


def _tma_load(desc, coordinates, barrier, buffer):
    def effect() -> None:
        place, inside = desc.places(coordinates)
        buffer.memory.copy_(torch.where(inside, desc.memory[place], 0))
        barrier.bytes -= buffer.memory.numel() * buffer.memory.element_size()
        barrier.settle()

    NOW.machine.start("load", buffer, effect)


def _tma_store(desc, coordinates, buffer, add=False):
    assert list(buffer.memory.shape) == desc.block_shape

    def effect() -> None:
        place, inside = desc.places(coordinates)
        new = buffer.memory[inside]
        if add:
            new = (desc.memory[place[inside]].float() + new.float()).to(desc.dtype)
        desc.memory[place[inside]] = new

    NOW.machine.start("store", buffer, effect)


def _copy_async(buffer, pointer):
    found = pointer.load()  # global memory does not change under the kernels
    NOW.machine.start("load", buffer, lambda: buffer.memory.copy_(found))


def _arrive_after_copies(barrier, increment_count):
    assert not increment_count
    mine = [item for item in NOW.machine.background if item[0] == "load" and item[1] == NOW.machine.group]
    vectors = [item for item in mine if item[2].memory.ndim == 1]
    for item in vectors:
        NOW.machine.complete(NOW.machine.background.index(item))
    barrier.arrive(32)


def _arrive(barrier, count):
    NOW.machine.tell()  # the compiler puts a barrier of the group's threads before it
    barrier.arrive(count)


def _expect(barrier, size):
    barrier.bytes += size
    barrier.arrive()


def _inline_assembly(text, constraints, arguments, dtype, is_pure, pack):
    if text.startswith("or.b32"):
        return arguments[0]
    assert text.startswith("ld.global.nc.v2.f32")
    (address,) = arguments
    assert not (address.offset % 8).any()
    pairs = address.memory.view(torch.float32).view(-1, 2)
    check_bounds(address.offset // 8, pairs[:, 0])
    found = pairs[address.offset // 8]
    return values(found[..., 0]), values(found[..., 1])


def _where(condition, a, b):
    if isinstance(condition, torch.Tensor):
        return values(torch.where(condition, a, torch.as_tensor(b, dtype=a.dtype if torch.is_tensor(a) else None)))
    return a if condition else b


def _extreme(of_tensors, of_numbers):
    return lambda a, b: of_tensors(a, b) if isinstance(a, torch.Tensor) else Number(of_numbers(a, b))


_LANGUAGE = types.SimpleNamespace(
    int16=torch.int16,
    int64=torch.int64,
    float32=torch.float32,
    allocate_shared_memory=Shared.allocate,
    arange=lambda a, b, layout=None: values(torch.arange(a, b)),
    zeros=lambda shape, dtype, layout=None: values(torch.zeros(shape, dtype=dtype)),
    full=lambda shape, value, dtype, layout=None: values(torch.full(shape, value, dtype=dtype)),
    where=_where,
    maximum=_extreme(torch.maximum, max),
    minimum=_extreme(torch.minimum, min),
    max=lambda x, axis: x.amax(axis),
    sum=lambda x, axis: x.sum(axis),
    exp2=torch.exp2,
    log2=torch.log2,
    load=lambda pointer, mask=None, other=0: pointer.load(mask, other),
    store=lambda pointer, value, mask=None: pointer.store(value, mask),
    program_id=lambda axis: NOW.machine.program,
    num_programs=lambda axis: NOW.machine.programs,
    split=lambda x: (values(x[..., 0]), values(x[..., 1])),
    join=lambda a, b: values(torch.stack((a, b), -1)),
    convert_layout=lambda x, layout: x,
    static_range=range,
    multiple_of=lambda x, n: x,
    pointer_type=lambda dtype: dtype,
    inline_asm_elementwise=_inline_assembly,
    warp_specialize=lambda *arguments: NOW.machine.specialize(*arguments),
    SliceLayout=lambda *_: None,
    BlockedLayout=lambda *_: None,
    DotOperandLayout=lambda *_: None,
    NVMMASharedLayout=lambda *_, **__: None,
    SwizzledSharedLayout=lambda *_: None,
)

_OVERRIDES = {
    "gl": _LANGUAGE,
    "tma": types.SimpleNamespace(store_wait=lambda left_over: NOW.machine.drain(NOW.machine.group)),
    "mbarrier": types.SimpleNamespace(
        wait=lambda barrier, phase: NOW.machine.switch(lambda: barrier.phase != phase),
        arrive=_arrive,
        expect=_expect,
    ),
    "async_copy": types.SimpleNamespace(mbarrier_arrive=_arrive_after_copies),
    "barriers": lambda n, count: types.SimpleNamespace(index=[Barrier(count) for _ in range(n)].__getitem__),
    "warpgroup_mma": _product,
    "warpgroup_mma_wait": _product_wait,
    "fence_async_shared": lambda: NOW.machine.fence(),
    "group_barrier": lambda: NOW.machine.tell(),
    "await_previous": lambda: None,
    "reinterpret": lambda buffer, dtype, shape, layout: buffer.reinterpret(dtype, shape),
    "release_next": lambda: None,
    "kept": lambda x: x,
    "apart": lambda x: x,
    "tma_load": _tma_load,
    "tma_store": _tma_store,
    "tma_add": lambda desc, coordinates, buffer: _tma_store(desc, coordinates, buffer, add=True),
    "copy_async": _copy_async,
    "accumulator": lambda columns: None,
    "shared_layout": lambda rows, columns, dtype: None,
}


def _namespace() -> dict[str, Any]:
    """The kernels' functions as plain Python over this file's machine."""
    space: dict[str, Any] = {"__builtins__": __builtins__}
    for module in (tile, forward_steps, forward, backward, query_gradient):
        for name, value in vars(module).items():
            if isinstance(value, JITFunction):
                space[name] = types.FunctionType(value.fn.__code__, space, name, value.fn.__defaults__)
            elif isinstance(value, constexpr):
                space[name] = value.value
    space.update(_OVERRIDES)  # in place: the functions hold this very dictionary
    return space


def kernel_function(name: str) -> Callable[..., Any]:
    """Return a function of the kernels' files as plain Python."""
    return _namespace()[name]


class EmulatedKernel:
    """Stands for a kernel at launch: `kernel[grid](**arguments)`."""

    def __init__(self, name: str, seed: int = 0) -> None:
        self.function, self.seed = kernel_function(name), seed
        self.arg_names = list(inspect.signature(self.function).parameters)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(num_warps: int, **arguments: Any) -> None:
            given = {name: _on_device(value) for name, value in arguments.items()}
            for program in range(grid[0]):
                NOW.machine = Machine(self.seed + program, program, grid[0])
                self.function(**given)

        return launch


def _on_device(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Pointer(value.view(-1) if value.is_contiguous() else value.as_strided((value.numel(),), (1,)))
    return Descriptor(value) if hasattr(value, "block_shape") else value
