"""Descriptors of a matrix's tiles, by which the hardware copies them from Hopper on."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fat5.ops.prepared_launch import Descriptor

_ALIGNMENT = 16  # bytes, of addresses and strides


class Tiles(TensorDescriptor, Descriptor):
    """Tiles of a matrix that is `describable`. What lies beyond its end reads as 0, and is not stored.

    Args:
        x: [rows, columns], or of more dimensions and contiguous.
        shape: How to see it: [rows, columns], or its rows in equal groups, [groups, rows a group, columns].
        block: Sizes of a tile.
    """

    def __init__(self, x: Tensor, shape: tuple[int, ...], block: tuple[int, ...]) -> None:
        row = x.stride(0) if x.ndim == 2 and x.shape[0] > 1 else shape[-1]
        self.base, self.shape, self.block_shape = x, list(shape), list(block)
        self.strides = [row, 1] if len(shape) == 2 else [shape[1] * row, row, 1]
        self.padding = "zero"
        self.kind = x.dtype, block


def describable(x: Tensor) -> Tensor:
    """Return a matrix, or a copy of it if the hardware does not take its address or its strides."""
    rows, columns = x.shape
    row = x.stride(0) if rows > 1 else columns
    dense = x.stride(1) == 1 and row >= columns
    if dense and x.data_ptr() % _ALIGNMENT == 0 and row * x.element_size() % _ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
