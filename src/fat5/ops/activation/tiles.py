"""How many elements a program of the activation's kernels takes, and with how many warps.

1,024 elements with 4 warps are one 16-byte load a thread and tensor in half precision: two tensors forward, three
backward. Programs are many and short, so that some load while others compute.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockTile:
    """A run of elements of one row.

    Args:
        block: Elements, a power of two.
        warps: Warps a program.
    """

    block: int
    warps: int

    def options(self) -> dict[str, int]:
        """Return what a launch passes to the compiler."""
        return {"num_warps": self.warps}


TILES = {"forward": BlockTile(1024, 4), "backward": BlockTile(1024, 4)}


def candidates() -> Iterator[BlockTile]:
    """Yield what `FAT5_AUTOTUNE` tries."""
    for block, warps in itertools.product((512, 1024, 2048, 4096, 8192), (2, 4, 8, 16)):
        if 256 <= block // warps <= 1024:
            yield BlockTile(block, warps)
