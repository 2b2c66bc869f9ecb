"""How many rows a program of the norm's kernels takes, and how it is run: one table, by width.

Forward: 2,048 elements with 4 warps are two 16-byte loads a thread; four rows of 512 measured 0.021 ms at 32,768 rows
on an H200. Backward: a program takes tile after tile, so that its share of the weight's gradient stays in registers,
and loads the next into registers while it computes: a row of up to 512 elements is one warp's, which waits for no
other. 24 warps with 2 KB each on their way keep 48 KB of a multiprocessor's loads under way, where a memory of 4 TB/s
with a latency of 0.8 microseconds needs 25, and more under load. They fit with 80 registers a thread, as compiled.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

MAX_WIDTH = 65_536
MAX_FUSED_WIDTH = 8_192
"""Widest row whose share of the weight's gradient fits the registers beside it; wider ones take a second kernel."""


@dataclass(frozen=True)
class RowTile:
    """Rows that a program holds at once.

    Args:
        rows: A power of two.
        warps: Warps a program.
        stages: 2 for a backward program that loads the next rows while it computes, else 1.
        programs: Backward programs a multiprocessor.
        overlap: Start the sum over backward programs while they end, on cards that can.
        unroll: Turns of a backward program's loop that are written out.
    """

    rows: int
    warps: int
    stages: int = 1
    programs: int = 1
    overlap: bool = True
    unroll: int = 1

    def options(self) -> dict[str, int]:
        """Return what a launch passes to the compiler."""
        options = {"num_warps": self.warps}
        if self.programs == 1:
            return options
        # A program for which no registers are left would start when the others have ended.
        return options | {"maxnreg": _REGISTERS // (32 * self.warps * self.programs) // 8 * 8}


WEIGHT_TILE = RowTile(16, 4, 1, 4)
WEIGHT_COLUMNS = 128
"""The second kernel's tile for rows above MAX_FUSED_WIDTH."""

MIN_SUM_PARTS, MAX_SUM_PARTS, SUM_COLUMNS, SUM_WARPS = 128, 1024, 8, 8
"""Tile of the sum over programs: all of them at once on most cards, in 32-byte pieces, the memory's smallest."""

LANES_BYTES = 32 * 16
"""What the lanes of a warp load at once; a backward program holds its rows in pieces of that width."""

_TILE_ELEMENTS = 2048  # 16 a thread with 4 warps
_ELEMENTS_A_WARP = 512
_ROW_OF_A_WARP = 512  # 16 elements a thread
_REGISTERS = 65_536  # of a multiprocessor
_ALIGNMENT = 16  # a row of another length is loaded an element at a time, each with an address of its own
# Widths whose best tile was found by measurement, over the rule below.
_FORWARD: dict[int, RowTile] = {512: RowTile(2, 2)}
_BACKWARD: dict[tuple[int, int, int], RowTile] = {
    (512, 2, 2): RowTile(4, 4, 2, 4),
    (512, 2, 3): RowTile(4, 4, 2, 4),
}  # by row, bytes of an element, and tensors that are read


@functools.cache
def forward_tile(block_d: int) -> RowTile:
    """Return the forward's tile for rows of up to `block_d` elements, a power of two."""
    warps = min(max(4, block_d // _ELEMENTS_A_WARP), 32)
    return _FORWARD.get(block_d) or RowTile(max(1, _TILE_ELEMENTS // block_d), warps)


def backward_tile(width: int, itemsize: int = 2, tensors: int = 2) -> RowTile:
    """Return the backward's tile for rows of `width` elements.

    Args:
        width: Elements of a row.
        itemsize: Bytes of an element.
        tensors: Rows that are read for one that is written: 2, or 3 with a gradient that reaches the sum on other ways.
    """
    block_d = 1 << (width - 1).bit_length()
    if width % _ALIGNMENT == 0 and (block_d, itemsize, tensors) in _BACKWARD:
        return _BACKWARD[block_d, itemsize, tensors]
    if block_d <= _ROW_OF_A_WARP:
        rows = 8 * _ROW_OF_A_WARP // block_d
        if width % _ALIGNMENT:
            return RowTile(rows // 2, 8, 1, 2)
        # 80 registers a thread, or 111 to 125
        return RowTile(rows, 8, 2, 3 if itemsize * tensors <= 4 and block_d > 32 else 2)
    warps = min(max(4, block_d // _ELEMENTS_A_WARP), 16 if block_d <= MAX_FUSED_WIDTH else 32)
    stages = 2 if block_d <= MAX_FUSED_WIDTH else 1
    together = 16 if itemsize * tensors <= 8 else 12  # 96 to 128 registers, or 164
    return RowTile(max(1, _TILE_ELEMENTS // block_d), warps, stages, max(1, together // warps))


def forward_candidates(block_d: int) -> Iterator[RowTile]:
    """Yield what `FAT5_AUTOTUNE` tries forward."""
    for rows, warps in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8)):
        if 256 <= rows * block_d // warps <= 1024:
            yield RowTile(rows, warps)


def backward_candidates(preferred: RowTile, block_d: int) -> Iterator[RowTile]:
    """Yield what `FAT5_AUTOTUNE` tries backward."""
    yield replace(preferred, overlap=False)
    yield replace(preferred, unroll=2)
    yield replace(preferred, unroll=4)
    depths = ((2, 16), (2, 20), (2, 24), (1, 24))  # stages, and warps a multiprocessor
    for warps, elements, (stages, together) in itertools.product((4, 8, 16), (16, 32), depths):
        rows = 32 * warps * elements // block_d  # by elements a thread
        if rows and together % warps == 0 and elements * together <= 16 * 32:
            yield RowTile(rows, warps, stages, together // warps)
