"""How many rows of a head a program of the rotary kernel takes, and with how many warps.

A tile of 2,048 channels of queries and as many of keys, with 4 warps, is 16 of each a thread: two 16-byte loads in half
precision. What keeps the memory busy is the number of programs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

_TILE_CHANNELS = 2048


@dataclass(frozen=True)
class RotaryTile:
    """Rows, one head of one token each, of a program.

    Args:
        rows: A power of two.
        warps: Warps a program.
    """

    rows: int
    warps: int

    def options(self) -> dict[str, int]:
        """Return what a launch passes to the compiler."""
        return {"num_warps": self.warps}


@functools.cache
def rotary_tile(block_d: int) -> RotaryTile:
    """Return the tile for heads of up to `block_d` channels, a power of two."""
    return RotaryTile(max(1, _TILE_CHANNELS // block_d), 4)


def rotary_candidates(block_d: int) -> Iterator[RotaryTile]:
    """Yield what `FAT5_AUTOTUNE` tries."""
    for channels, warps in itertools.product((512, 1024, 2048, 4096, 8192), (1, 2, 4, 8)):
        if channels >= block_d and 256 <= channels // warps <= 2048:
            yield RotaryTile(channels // block_d, warps)
