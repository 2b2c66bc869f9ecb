"""Launching the same kernel again without asking Triton anew what its arguments are.

`kernel[grid](...)` looks at each argument at each launch, to find the binary that was compiled for arguments of its
kind; that costs the host several times as much as the launch. A `PreparedLaunch` fixes the grid and all arguments but
the tensors. What then decides on the binary is all in its key:

- scalars, constants and compiler options, by their values, which never change;
- a tensor's type, or that it is absent;
- whether a tensor's address is a multiple of 16: it must be, else the launch goes Triton's way;
- a descriptor's type and tile, `Descriptor.kind`;
- the current device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
import triton
from torch import Tensor

LAUNCHES_KEPT = 4096
"""How many prepared launches of one kind are remembered."""

_ALIGNMENT = 16
# A compiled kernel is launched with all arguments by position, constants too, in the versions where that was tried.
_REUSES = triton.__version__.split(".")[:2] == ["3", "6"] and torch.version.hip is None


class Descriptor(Protocol):
    """A description of a tensor's tiles, as an argument of a kernel; Triton itself holds it to its alignment."""

    kind: Hashable


class PreparedLaunch:
    """A kernel with its grid and all arguments but its tensors.

    Called with the tensors, in the order of the kernel's parameters: None for one that is absent, descriptors among
    them.

    Args:
        kernel: What `triton.jit` or `gluon.jit` made.
        grid: One to three sizes.
        fixed: The other arguments, constants and compiler options, by name.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], /, **fixed: Any) -> None:
        self._kernel, self._grid, self._fixed = kernel, grid, fixed
        self._names = [name for name in kernel.arg_names if name not in fixed]
        self._template = [fixed.get(name) for name in kernel.arg_names]
        self._places = [place for place, name in enumerate(kernel.arg_names) if name not in fixed]
        self._reuses = _REUSES and isinstance(kernel, triton.runtime.JITFunction)  # and is not interpreted
        self._compiled: dict[Hashable, Callable[..., Any]] = {}

    def __call__(self, *tensors: Tensor | Descriptor | None) -> None:
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


def ceil_divide(a: int, b: int) -> int:
    """Return `a / b`, rounded up. `triton.cdiv`, which also runs inside kernels, costs the host ten times as much."""
    return -(-a // b)


def ceil_power_of_2(n: int) -> int:
    """Return the least power of two that is at least `n`, which is 1 or more."""
    return 1 << (n - 1).bit_length()
