"""The tile of the fused kernel.

With some hundred columns of x a product has few steps, and the activation and three stores come behind them. Two small
programs a multiprocessor hide one another's: on an H200 they were faster than one of twice the size, which reads less
from the L2 cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ProductTile:
    """What a program computes at a time.

    Args:
        rows: Tokens.
        columns: Of the activation; the product has twice as many, gate and up.
        depth: Columns of a step of the sum.
        warps: Warps a program.
        stages: Steps under way.
        group: Tiles of rows that go through the columns together.
        resident: Programs a multiprocessor.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int
    resident: int

    def options(self) -> dict[str, int]:
        """Return what a launch passes to the compiler."""
        return {"num_warps": self.warps, "num_stages": self.stages}

    def __str__(self) -> str:
        size = f"{self.rows}x{self.columns}x{self.depth}, {self.warps} warps, {self.stages} stages"
        return f"{size}, group {self.group}, {self.resident} resident"


TILE = ProductTile(128, 64, 64, 8, 3, group=1, resident=2)


def candidates() -> Iterator[ProductTile]:
    """Yield what `FAT5_AUTOTUNE` tries."""
    for group in (1, 2, 8):
        yield ProductTile(128, 64, 64, 8, 3, group, 2)
        yield ProductTile(128, 64, 64, 4, 3, group, 2)
    yield ProductTile(128, 64, 32, 8, 5, 1, 2)
    yield ProductTile(128, 128, 64, 8, 4, 1, 1)
    yield ProductTile(256, 64, 64, 8, 3, 1, 1)
