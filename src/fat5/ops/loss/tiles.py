"""How the loss kernels are run: columns and warps a program, by the length of a row.

A row of the paired kernel stays in registers, 64 logits a thread: at 64 registers a thread, 2 x 32,768 logits share a
multiprocessor, and one row is read while another is stored. Rows of the block kernel are read twice; few of them are in
flight, so that the second read finds them in the L2 cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

KERNELS = ("pairs", "blocks", "gradient")

MAX_PAIRED_COLUMNS = 65_536
"""The longest row that one program holds in registers: 32 warps of 64 logits a thread."""

_REGISTERS = 65_536  # of a multiprocessor
_LOGITS_A_THREAD = 64
_SHARED_MEMORY = 227 * 1024  # of a multiprocessor of Hopper; what a smaller card cannot hold loses its measurement
_ALIGNMENT = 16  # what Triton asks of a length to load 16 bytes at once


@dataclass(frozen=True)
class Tile:
    """How a kernel is run.

    Args:
        columns: Logits that a program works on at a time, a power of two; all of a row for `pairs`.
        warps: Warps a program.
        stages: Depth of the software pipeline of the blocks; of `pairs` 2 for programs that take row after row and load
            the next while they work on one, else 1.
        registers: Most registers a thread, where fewer let one more program share a multiprocessor; the compiler's
            choice if None.
    """

    columns: int
    warps: int
    stages: int = 1
    registers: int | None = None

    def programs(self) -> int:
        """Return how many programs a multiprocessor holds, by the registers of their threads."""
        return max(1, _REGISTERS // (32 * self.warps * (self.registers or 128)))

    def options(self) -> dict[str, int]:
        """Return what a launch passes to the compiler."""
        options = {"num_warps": self.warps}
        return options if self.registers is None else options | {"maxnreg": self.registers}


def preferred_tile(kernel: str, vocab_size: int) -> Tile:
    """Return the tile of a kernel in `KERNELS` for rows of this length."""
    if kernel in _forced:
        return _forced[kernel]
    columns = 1 << (vocab_size - 1).bit_length()
    aligned = vocab_size % _ALIGNMENT == 0  # otherwise each logit is loaded alone, which takes registers
    if kernel == "pairs":
        columns = max(columns, 32 * _LOGITS_A_THREAD)
        return Tile(columns, columns // (32 * _LOGITS_A_THREAD), registers=64 if aligned else None)
    if kernel == "gradient":
        return Tile(min(max(columns, 128), 4096), 4)
    if not aligned:
        columns = min(max(columns, 1024), 8192)
        return Tile(columns, columns // 1024)
    if vocab_size > MAX_PAIRED_COLUMNS:
        return Tile(32_768, 32, registers=64)
    columns = min(max(columns, 1024), 16_384)
    return Tile(columns, columns // 1024, registers=64 if columns == 16_384 else None)


def candidates(kernel: str, vocab_size: int, itemsize: int = 2) -> list[Tile]:
    """Return the tiles worth measuring for rows of this length and logits of `itemsize` bytes, the preferred one first.

    A pipeline of n stages keeps n - 1 blocks in shared memory, and those of a tile must fit there.
    """
    preferred = preferred_tile(kernel, vocab_size)
    columns, warps = preferred.columns, preferred.warps
    others = {
        "pairs": [
            Tile(columns, warps),
            Tile(columns, max(warps // 2, 1), registers=128),
            Tile(columns, min(2 * warps, 32)),
            Tile(columns, warps, 2, 128),
            Tile(columns, min(2 * warps, 32), 2, 64),
        ],
        "blocks": [
            Tile(size, warps, stages)
            for size, warps in ((4096, 4), (4096, 8), (8192, 8), (8192, 16), (16_384, 16), (32_768, 32))
            for stages in (1, 2, 3)
            if (stages - 1) * size * itemsize < _SHARED_MEMORY
        ],
        "gradient": [Tile(size, warps) for size in (1024, 2048, 4096, 8192) for warps in (4, 8)],
    }[kernel]
    return list(dict.fromkeys([preferred, *others]))


_forced: dict[str, Tile] = {}


def is_forced(kernel: str) -> bool:
    """Whether a kernel is run with a tile that someone measures, and so wherever it can."""
    return kernel in _forced


@contextlib.contextmanager
def forced_tile(kernel: str, tile: Tile) -> Iterator[None]:
    """Run a kernel with this tile inside the block: for measuring candidates."""
    before = dict(_forced)
    _forced[kernel] = tile
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)
