"""How many rows a program of the norm's kernels takes, and how it is run: one table, by width.

Forward: 2,048 elements with 4 warps are two 16-byte loads a thread; four rows of 512 measured 0.021 ms at 32,768 rows on
an H200. Backward: a program takes tile after tile, so that its share of the weight's gradient stays in registers;
`programs` of them run on each multiprocessor at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

MAX_WIDTH = 65_536
MAX_FUSED_WIDTH = 16_384
"""Widest row whose share of the weight's gradient fits the registers beside it; wider ones take a second kernel."""


@dataclass(frozen=True)
class RowTile:
    """Rows that a program holds at once.

    Args:
        rows: A power of two.
        warps: Warps a program.
        stages: Depth of the software pipeline over the rows of a backward program.
        programs: Backward programs a multiprocessor.
    """

    rows: int
    warps: int
    stages: int = 1
    programs: int = 1

    def options(self) -> dict[str, int]:
        """Return what a launch passes to the compiler."""
        return {"num_warps": self.warps}


_FORWARD = {
    512: RowTile(4, 4),
    1024: RowTile(2, 4),
}
_BACKWARD = {
    512: RowTile(4, 4, 1, 4),
    1024: RowTile(2, 4, 1, 4),
}

WEIGHT_TILE = RowTile(16, 4, 1, 4)
WEIGHT_COLUMNS = 128
"""The second kernel's tile for rows above MAX_FUSED_WIDTH."""

SUM_PARTS, SUM_COLUMNS, SUM_WARPS = 128, 16, 4
"""Tile of the sum over programs."""

_TILE_ELEMENTS = 2048  # 16 a thread with 4 warps
_MOST_WARPS = 32


def forward_tile(block_d: int) -> RowTile:
    """Return the forward's tile for rows of up to `block_d` elements, a power of two."""
    return _FORWARD.get(block_d) or RowTile(max(1, _TILE_ELEMENTS // block_d), _warps(block_d, 512))


def backward_tile(block_d: int) -> RowTile:
    """Return the backward's tile for rows of up to `block_d` elements, a power of two."""
    return _BACKWARD.get(block_d) or RowTile(
        max(1, _TILE_ELEMENTS // block_d), _warps(block_d, 512), 1, 4 if block_d <= _TILE_ELEMENTS else 1
    )


def forward_candidates(block_d: int) -> Iterator[RowTile]:
    """Yield what `FAT5_AUTOTUNE` tries forward."""
    for rows, warps in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8)):
        if 256 <= rows * block_d // warps <= 2048:
            yield RowTile(rows, warps)


def backward_candidates(block_d: int) -> Iterator[RowTile]:
    """Yield what `FAT5_AUTOTUNE` tries backward."""
    axes = ((1, 2, 4, 8, 16), (2, 4, 8, 16), (1, 2, 3), (1, 2, 4, 6, 8))
    for rows, warps, stages, programs in itertools.product(*axes):
        if 256 <= rows * block_d // warps <= 1024 and 8 <= warps * programs <= 48:
            yield RowTile(rows, warps, stages, programs)


def _warps(block_d: int, elements_a_warp: int) -> int:
    return min(max(4, block_d // elements_a_warp), _MOST_WARPS)
