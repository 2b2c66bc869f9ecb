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

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fat5.ops.attention.hopper.records import BEYOND

_FAR = 0x7FFF0000
_WRAP = 2**34


def rows_descriptor(x: Tensor, rows: int, columns: int, ragged: bool) -> TensorDescriptor:
    """Describe tiles of `rows` rows of one head and `columns` of its columns.

    Args:
        x: [B, L, H, D], or packed [total, H, D], with strides that `support.strides_refuse` lets pass.
        rows: Rows of a tile.
        columns: Columns of a tile.
        ragged: The second form.
    """
    heads, width = x.shape[-2:]
    row, head = x.stride(-3), x.stride(-2)
    # The stride of a dimension of one element says nothing.
    row = row if x.shape[-3] > 1 else heads * width
    head = head if heads > 1 else width
    if ragged:
        shape = [_FAR, _FAR, heads, BEYOND.value, width]
        strides = [_WRAP - row, row, head, row, 1]
    else:
        batch, length = x.shape[:2]
        shape = [1, batch, heads, length, width]
        strides = [width, x.stride(0) if batch > 1 else length * heads * width, head, row, 1]
    block = [1, 1, 1, rows, columns]
    return TensorDescriptor(
        x, shape, strides, block, gl.NVMMASharedLayout.get_default_for(block, _ELEMENTS[str(x.dtype)])
    )


def matrix_descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe tiles of a contiguous matrix."""
    block = [rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, _ELEMENTS[str(x.dtype)])
    return TensorDescriptor(x, list(x.shape), [x.shape[1], 1], block, layout)


_ELEMENTS = {"torch.bfloat16": gl.bfloat16, "torch.float16": gl.float16, "torch.float32": gl.float32}
