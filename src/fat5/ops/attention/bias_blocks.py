"""A bias seen one block of scores at a time: its values, and the sum of its gradient."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional as F


def _toeplitz(values: Tensor, num_rows: int, num_cols: int) -> Tensor:
    """Spread values by distance, [H, m + n - 1], over a block [H, m, n]; the last row starts with the first value."""
    return values.unfold(-1, num_cols, 1)[:, :num_rows].flip(1)


def _diagonal_sums(block: Tensor) -> Tensor:
    """Sum a block [H, m, n] along its diagonals to [H, m + n - 1]: the transpose of `_toeplitz`.

    Padding each row by m and reading the same memory with rows one shorter moves row r right by r.
    """
    heads, rows, cols = block.shape
    skewed = F.pad(block.flip(1), (0, rows)).flatten(1)[:, : rows * (rows + cols - 1)]
    return skewed.view(heads, rows, rows + cols - 1).sum(1)


@dataclasses.dataclass
class BiasBlocks:
    """No bias. The subclasses add theirs to a block of scores and collect the gradient when `grad` is a tensor."""

    grad: Tensor | None = None
    batch: slice = dataclasses.field(default_factory=lambda: slice(None))

    def rows_of_batch(self, batch: slice) -> BiasBlocks:
        """Return the same bias for some sequences of the batch, collecting into the same gradient."""
        return dataclasses.replace(self, batch=batch)

    def add(self, scores: Tensor, rows: slice, cols: slice, offset: int) -> Tensor:
        """Return the scores [B, H, m, n] with the bias of queries `rows` and keys `cols` added."""
        return scores

    def accumulate(self, grad_scores: Tensor, rows: slice, cols: slice, offset: int) -> None:
        """Add the bias's share of a block's gradient [B, H, m, n] to `grad`."""


@dataclasses.dataclass
class DistanceBlocks(BiasBlocks):
    """Table by distance [H, 2R + 1], constant beyond R."""

    table: Tensor = dataclasses.field(kw_only=True)

    def add(self, scores: Tensor, rows: slice, cols: slice, offset: int) -> Tensor:
        """Add the table's values."""
        radius = self.table.shape[1] // 2
        first = cols.start - (rows.stop - 1) - offset
        distance = torch.arange(first, cols.stop - rows.start - offset, device=scores.device)
        values = self.table[:, distance.clamp_(-radius, radius) + radius]
        return scores + _toeplitz(values, *scores.shape[-2:])

    def accumulate(self, grad_scores: Tensor, rows: slice, cols: slice, offset: int) -> None:
        """Sum the diagonals: those beyond R go to the table's ends. Slices, so nothing is added twice at once."""
        if self.grad is None:
            return
        sums = _diagonal_sums(grad_scores.sum(0))
        radius = self.table.shape[1] // 2
        first = cols.start - (rows.stop - 1) - offset
        left = min(max(-radius - first, 0), sums.shape[1])
        right = min(max(radius + 1 - first, left), sums.shape[1])
        self.grad[:, 0] += sums[:, :left].sum(1)
        self.grad[:, first + left + radius : first + right + radius] += sums[:, left:right]
        self.grad[:, -1] += sums[:, right:].sum(1)


@dataclasses.dataclass
class AlibiBlocks(BiasBlocks):
    """Slopes [H] times the distance."""

    slopes: Tensor = dataclasses.field(kw_only=True)
    symmetric: bool = dataclasses.field(kw_only=True)

    def _distance(self, rows: slice, cols: slice, offset: int) -> Tensor:
        first = cols.start - (rows.stop - 1) - offset
        device, dtype = self.slopes.device, self.slopes.dtype
        distance = torch.arange(first, cols.stop - rows.start - offset, device=device, dtype=dtype)
        return -distance.abs() if self.symmetric else distance

    def add(self, scores: Tensor, rows: slice, cols: slice, offset: int) -> Tensor:
        """Add slope times distance."""
        values = self.slopes[:, None] * self._distance(rows, cols, offset)
        return scores + _toeplitz(values, *scores.shape[-2:])

    def accumulate(self, grad_scores: Tensor, rows: slice, cols: slice, offset: int) -> None:
        """Add the gradient's first moment over the distance."""
        if self.grad is not None:
            self.grad += (_diagonal_sums(grad_scores.sum(0)) * self._distance(rows, cols, offset)).sum(1)


@dataclasses.dataclass
class DenseBlocks(BiasBlocks):
    """A tensor [B or 1, H or 1, Lq or 1, Lk]."""

    tensor: Tensor = dataclasses.field(kw_only=True)

    def _index(self, rows: slice, cols: slice) -> tuple[slice, slice, slice, slice]:
        every = slice(None)
        batch = self.batch if self.tensor.shape[0] > 1 else every
        return (batch, every, rows if self.tensor.shape[2] > 1 else every, cols)

    def add(self, scores: Tensor, rows: slice, cols: slice, offset: int) -> Tensor:
        """Add the block of the tensor."""
        return scores + self.tensor[self._index(rows, cols)].to(scores.dtype)

    def accumulate(self, grad_scores: Tensor, rows: slice, cols: slice, offset: int) -> None:
        """Sum over exactly the axes that the tensor broadcasts."""
        if self.grad is not None:
            block = self.grad[self._index(rows, cols)]
            block += grad_scores.sum_to_size(block.shape)
