"""Tiles of the kernel of a linear layer for a few rows."""

from __future__ import annotations

from dataclasses import dataclass

BM = 16
"""Rows of a program: the least that a matrix unit multiplies."""

_MANY_COLUMNS = 1024
_WIDTH_OF_A_WARP = 128  # few enough that all of a thread's loads are on their way at once
_LEAST_WARPS, _MOST_WARPS = 4, 16


@dataclass(frozen=True)
class LinearTile:
    """What one program of the kernel multiplies.

    Args:
        columns: Of the output: few, so that many programs share the weights.
        parts: In how many parts, one a warp, the input's columns are cut.
        block_k: Columns of a part, a power of two.
    """

    columns: int
    parts: int
    block_k: int

    def shared_memory(self, itemsize: int, *, gated: bool) -> int:
        """Return the bytes of shared memory that its operands take."""
        return (BM + (2 if gated else 1) * self.columns) * self.parts * self.block_k * itemsize


def linear_tile(width: int, columns: int, itemsize: int) -> LinearTile:
    """Return the tile for an input of this width and so many columns of the output."""
    padded = 1 << (width - 1).bit_length()
    # True float32 has no matrix unit: smaller tiles keep the operands in registers.
    per_warp = _WIDTH_OF_A_WARP if itemsize == 2 else _WIDTH_OF_A_WARP // 4
    parts = max(_LEAST_WARPS, min(_MOST_WARPS, padded // per_warp))
    block_k = max(16, -(-width // parts))
    return LinearTile(
        columns=16 if columns > _MANY_COLUMNS and itemsize == 2 else 8,
        parts=parts,
        block_k=1 << (block_k - 1).bit_length(),
    )
