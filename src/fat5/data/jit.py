"""Compilation of the data engine: numba, cached on disk where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` at its first call and keep the machine code for later processes.

    Numba keeps it in `NUMBA_CACHE_DIR` if that is set, else beside the source, else in the user's cache folder; where
    none can be written (a read-only image) each process compiles anew, a few seconds, and the import still works.

    Numba notices an edit of the file in which a cached function stands, not of the files whose functions it calls.
    Hence a cached kernel calls only functions of its own file and of `counter_random`, which never changes.
    """
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:
        return numba.njit(nogil=True)(function)


def read_only(array: np.ndarray, dtype: Any = None) -> np.ndarray:
    """Return a contiguous read-only view of `array` (a copy only if `dtype` or the layout asks for one).

    Numba compiles a kernel once for each combination of argument types, and writeable, read-only and unaligned arrays
    differ in type; through this view a kernel sees one.
    """
    view = np.ascontiguousarray(array, dtype=dtype).view(np.ndarray)
    view.setflags(write=False)
    return view
