"""Launching the same kernel again without asking Triton anew what its arguments are.

`kernel[grid](...)` looks at each argument at each launch, to find the binary that was compiled for arguments of its
kind; that costs the host several times as much as the launch. A `PreparedLaunch` fixes the grid and all arguments but
the tensors. What then decides on the binary is all in its key:

- scalars, constants and compiler options, by their values, which never change;
- an integer that each call gives: whether it is 1, a multiple of 16, and fits 32 bits;
- a tensor's type, or that it is absent;
- whether a tensor's address is a multiple of 16: it must be, else the launch goes Triton's way;
- a descriptor's type and tile, `Descriptor.kind`;
- the current device.

Launch hooks, such as a profiler's, are called as ever; hooks of a kernel before its run, and a debug mode that is
switched on after a first launch, are not looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

LAUNCHES_KEPT = 1024
"""How many prepared launches of one kind are remembered, some KB each."""

_ALIGNMENT = 16
# A compiled kernel is launched with all arguments by position, constants too, in the versions where that was tried.
_REUSES = triton.__version__.split(".")[:2] == ["3", "6"] and torch.version.hip is None


class Descriptor:
    """A description of a tensor's tiles, as an argument of a kernel: what there is of them beside `Tensor`.

    Attributes:
        kind: What a kernel is compiled for, such as type and tile. Alignment is no part of it: a descriptor has to have
            it.
    """

    kind: Hashable


_VALUES = frozenset((int, float, bool, str, type(None)))  # what is not a tensor


def can_reuse(kernel: Any) -> bool:
    """Whether the kernel is compiled, and not interpreted, by a Triton whose binaries can be launched again."""
    return _REUSES and isinstance(kernel, triton.runtime.JITFunction)


class PreparedLaunch:
    """A kernel with its grid and all arguments but its tensors, and such integers as differ from call to call.

    Called with the tensors, None for one that is absent, descriptors and integers among them.

    Args:
        kernel: What `triton.jit` or `gluon.jit` made.
        grid: One to three sizes.
        tensors: Names of the parameters that a call gives, in its order; by default all that are not fixed, in the
            kernel's.
        fixed: The other arguments, constants and compiler options, by name.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], tensors: Sequence[str] | None = None, /, **fixed: Any
    ) -> None:
        self._kernel, self._grid, self._fixed = kernel, grid, fixed
        self._names = [name for name in kernel.arg_names if name not in fixed] if tensors is None else tensors
        self._template = [fixed.get(name) for name in kernel.arg_names]
        self._places = [kernel.arg_names.index(name) for name in self._names]
        self._reuses = can_reuse(kernel)
        self._compiled: dict[Hashable, Callable[..., Any]] = {}

    def __call__(self, *tensors: Tensor | Descriptor | int | None) -> None:
        """Launch on the current device and stream."""
        addresses = 0
        kinds: list[Hashable] = []
        arguments = self._template.copy()
        for place, x in zip(self._places, tensors, strict=True):
            arguments[place] = x
            if x is None:
                kinds.append(None)
            elif isinstance(x, Tensor):
                addresses |= x.data_ptr()
                kinds.append(x.dtype)
            elif isinstance(x, int):
                kinds.append((x == 1, x % _ALIGNMENT == 0, -(2**31) <= x < 2**31))
            else:
                kinds.append(x.kind)
        if not self._reuses or addresses % _ALIGNMENT:
            self._launch(tensors)
            return
        kinds.append(triton.runtime.driver.active.get_current_device())
        key = tuple(kinds)
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled(*arguments)
            return
        launched = self._launch(tensors)
        if launched is not None:
            self._compiled[key] = launched[(*self._grid, 1, 1)[:3]]

    def _launch(self, tensors: tuple[Any, ...]) -> Any:
        return self._kernel[self._grid](**dict(zip(self._names, tensors, strict=True)), **self._fixed)


prepared = functools.lru_cache(LAUNCHES_KEPT)(PreparedLaunch)
"""`PreparedLaunch`, remembered by the kernel, the grid and all that is fixed."""


class PreparedLaunches:
    """Prepared launches, remembered by whatever fixes them: for those whose maker takes more than that.

    One place of a key always holds values of one type: 1, 1.0 and True are equal, and compiled apart.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, PreparedLaunch] = {}

    def get(self, key: Hashable, make: Callable[[], PreparedLaunch]) -> PreparedLaunch:
        """Return the launch of a key, made where it is missing."""
        launch = self._kept.get(key)
        if launch is None:
            if len(self._kept) >= LAUNCHES_KEPT:
                self._kept.clear()
            launch = self._kept[key] = make()
        return launch


class Relaunched:
    """A kernel that is launched as ever, `kernel[grid](...)`, by a launch that was prepared when it was first seen.

    It sorts the arguments at each call; a `PreparedLaunch` at hand is faster, the more the fewer its tensors.

    Args:
        kernel: What `triton.jit` or `gluon.jit` made.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._prepared = PreparedLaunches()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        """Return the launch on a grid."""
        return functools.partial(self._launch, grid) if can_reuse(self.kernel) else self.kernel[grid]

    def _launch(self, grid: tuple[int, ...], *positional: Any, **named: Any) -> None:
        arguments = named if not positional else dict(zip(self.kernel.arg_names, positional, strict=False)) | named
        tensors = [x for x in arguments.values() if type(x) not in _VALUES]
        values = [x if type(x) in _VALUES else Tensor for x in arguments.values()]
        self._prepared.get((grid, *arguments, *values), lambda: self._prepare(grid, arguments))(*tensors)

    def _prepare(self, grid: tuple[int, ...], arguments: dict[str, Any]) -> PreparedLaunch:
        tensors = [name for name, x in arguments.items() if type(x) not in _VALUES]
        fixed = {name: x for name, x in arguments.items() if type(x) in _VALUES}
        return PreparedLaunch(self.kernel, grid, tensors, **fixed)


def ceil_divide(a: int, b: int) -> int:
    """Return `a / b`, rounded up. `triton.cdiv`, which also runs inside kernels, costs the host ten times as much."""
    return -(-a // b)


def ceil_power_of_2(n: int) -> int:
    """Return the least power of two that is at least `n`, which is 1 or more."""
    return 1 << (n - 1).bit_length()
