"""TMA descriptors of rows: what a kernel loads or stores past the end of a sequence stays inside the sequence.

Two forms of rank 5, so that one kernel serves both:

- Rows of equal length: [1, B, H, L, D]. The hardware fills what lies beyond L with 0 and drops what is stored there.
- Sequences anywhere: [2^31, 2^31, H, 2^30, D] with strides [2^34 - row, row, head, row, 1]. At (2^30, y, h, x) the
  first
  two terms and x add up, in 64 bits that wrap, to row x + y - 2^30. With y = end of the sequence and x = 2^30 - rows
  left, a sequence ends exactly where x leaves its dimension, so the same hardware check holds for each one. (Triton's
  `tools/ragged_tma.py` does this; it is in use on Hopper.)
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fat5.ops.attention.hopper.records import BEYOND
from fat5.ops.prepared_launch import LAUNCHES_KEPT, Descriptor

_FAR = 0x7FFF0000
_WRAP = 2**34


class _Form(NamedTuple):
    """What the descriptors of equal tensors have in common."""

    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: gl.NVMMASharedLayout
    kind: Hashable


class Tiles(TensorDescriptor, Descriptor):
    """A descriptor of a tensor that `support.strides_refused` let pass, which is not checked again."""

    def __init__(self, base: Tensor, form: _Form) -> None:
        self.base = base
        self.shape, self.strides, self.block_shape, self.layout, self.kind = form
        self.padding = "zero"


def rows_descriptor(x: Tensor, rows: int, columns: int, ragged: bool) -> Tiles:
    """Describe tiles of `rows` rows of one head and `columns` of its columns.

    Args:
        x: [B, L, H, D], or packed [total, H, D], with strides that `support.strides_refused` lets pass.
        rows: Rows of a tile.
        columns: Columns of a tile.
        ragged: The second form.
    """
    return Tiles(x, _rows_form(x.shape, x.stride(), x.dtype, rows, columns, ragged))


def matrix_descriptor(x: Tensor, rows: int, columns: int) -> Tiles:
    """Describe tiles of a contiguous matrix."""
    return Tiles(x, _matrix_form(x.shape, x.dtype, rows, columns))


@functools.lru_cache(LAUNCHES_KEPT)
def _rows_form(
    sizes: tuple[int, ...], steps: tuple[int, ...], dtype: torch.dtype, rows: int, columns: int, ragged: bool
) -> _Form:
    heads, width = sizes[-2:]
    # The stride of a dimension of one element says nothing.
    row = steps[-3] if sizes[-3] > 1 else heads * width
    head = steps[-2] if heads > 1 else width
    if ragged:
        shape = [_FAR, _FAR, heads, BEYOND.value, width]
        strides = [_WRAP - row, row, head, row, 1]
    else:
        batch, length = sizes[:2]
        shape = [1, batch, heads, length, width]
        strides = [width, steps[0] if batch > 1 else length * heads * width, head, row, 1]
    return _form(shape, strides, [1, 1, 1, rows, columns], dtype)


@functools.lru_cache(LAUNCHES_KEPT)
def _matrix_form(sizes: tuple[int, ...], dtype: torch.dtype, rows: int, columns: int) -> _Form:
    return _form(list(sizes), [sizes[1], 1], [rows, columns], dtype)


def _form(shape: list[int], strides: list[int], block: list[int], dtype: torch.dtype) -> _Form:
    layout = gl.NVMMASharedLayout.get_default_for(block, _ELEMENTS[str(dtype)])
    return _Form(shape, strides, block, layout, kind=(dtype, *block))


_ELEMENTS = {"torch.bfloat16": gl.bfloat16, "torch.float16": gl.float16, "torch.float32": gl.float32}
