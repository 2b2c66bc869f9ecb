"""How many rows a program of the norm's kernels takes, and how it is run: one table, by width.

Forward: 2,048 elements with 4 warps are two 16-byte loads a thread; four rows of 512 measured 0.021 ms at 32,768 rows
on an H200. Backward: a program takes tile after tile, so that its share of the weight's gradient stays in registers,
and loads the next while it computes. Programs of 16 warps together keep 32 KB and more of each multiprocessor's loads
on their way: what a memory of 4 TB/s with a latency of 0.8 microseconds needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

MAX_WIDTH = 65_536
MAX_FUSED_WIDTH = 8_192
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


WEIGHT_TILE = RowTile(16, 4, 1, 4)
WEIGHT_COLUMNS = 128
"""The second kernel's tile for rows above MAX_FUSED_WIDTH."""

SUM_PARTS, SUM_COLUMNS, SUM_WARPS = 1024, 8, 8
"""Tile of the sum over programs: all of them at once on most cards, in 32-byte pieces, the memory's smallest."""

_TILE_ELEMENTS = 2048  # 16 a thread with 4 warps
_ELEMENTS_A_WARP = 512
_WARPS_A_PROCESSOR = 16
# Widths whose best tile was found by measurement, over the rule below.
_FORWARD: dict[int, RowTile] = {512: RowTile(4, 4)}
_BACKWARD: dict[int, RowTile] = {}


def forward_tile(block_d: int) -> RowTile:
    """Return the forward's tile for rows of up to `block_d` elements, a power of two."""
    warps = min(max(4, block_d // _ELEMENTS_A_WARP), 32)
    return _FORWARD.get(block_d) or RowTile(max(1, _TILE_ELEMENTS // block_d), warps)


def backward_tile(block_d: int) -> RowTile:
    """Return the backward's tile for rows of up to `block_d` elements, a power of two."""
    warps = min(max(4, block_d // _ELEMENTS_A_WARP), 16 if block_d <= MAX_FUSED_WIDTH else 32)
    stages = 2 if block_d <= _TILE_ELEMENTS else 1
    tile = RowTile(max(1, _TILE_ELEMENTS // block_d), warps, stages, max(1, _WARPS_A_PROCESSOR // warps))
    return _BACKWARD.get(block_d) or tile


def forward_candidates(block_d: int) -> Iterator[RowTile]:
    """Yield what `FAT5_AUTOTUNE` tries forward."""
    for rows, warps in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8)):
        if 256 <= rows * block_d // warps <= 1024:
            yield RowTile(rows, warps)


def backward_candidates(block_d: int) -> Iterator[RowTile]:
    """Yield what `FAT5_AUTOTUNE` tries backward."""
    axes = ((1, 2, 4, 8, 16), (2, 4, 8, 16), (1, 2, 3), (1, 2, 4, 8))
    for rows, warps, stages, programs in itertools.product(*axes):
        if 512 <= rows * block_d // warps <= 1024 and 8 <= warps * programs <= 32:
            yield RowTile(rows, warps, stages, programs)
