"""Tile sizes of the kernels: one table, keyed by kernel, architecture and head dimension.

A row of the table was chosen by measurement on sm_90 and by what fits elsewhere. Whatever the table says, a launch that
asks for more shared memory than the card has falls back to the next smaller tile (`fallbacks`).
"""

from __future__ import annotations

from dataclasses import dataclass

SHARED_MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory that one block may use, by architecture (compute capability times ten)."""

KERNELS = ("forward", "key_value", "query", "band", "dense_bias")


@dataclass(frozen=True)
class Tile:
    """Size of a tile of scores and how it is run.

    Args:
        queries: Rows, a power of two of at least 16.
        keys: Columns, likewise. The query kernel's `queries` is a multiple of its `keys`, the side of the band's tiles.
        warps: Warps a program.
        stages: Depth of the software pipeline.
    """

    queries: int
    keys: int
    warps: int
    stages: int


_LARGE = {  # sm_80, sm_100: much shared memory
    ("forward", 16): Tile(128, 64, 4, 3),
    ("forward", 32): Tile(128, 64, 4, 3),
    ("forward", 64): Tile(128, 64, 4, 3),
    ("forward", 128): Tile(128, 64, 8, 2),
    ("forward", 256): Tile(64, 32, 4, 2),
    ("key_value", 16): Tile(64, 64, 4, 2),
    ("key_value", 32): Tile(64, 64, 4, 2),
    ("key_value", 64): Tile(64, 64, 4, 2),
    ("key_value", 128): Tile(32, 64, 4, 2),
    ("key_value", 256): Tile(32, 32, 4, 1),
    ("query", 16): Tile(64, 64, 4, 2),
    ("query", 32): Tile(64, 64, 4, 2),
    ("query", 64): Tile(64, 64, 4, 2),
    ("query", 128): Tile(64, 64, 4, 2),
    ("query", 256): Tile(32, 32, 4, 1),
    ("band", 16): Tile(64, 64, 4, 2),
    ("band", 32): Tile(64, 64, 4, 2),
    ("band", 64): Tile(64, 64, 4, 2),
    ("band", 128): Tile(64, 64, 4, 1),
    ("band", 256): Tile(32, 32, 4, 1),
    ("dense_bias", 16): Tile(64, 64, 4, 2),
    ("dense_bias", 32): Tile(64, 64, 4, 2),
    ("dense_bias", 64): Tile(64, 64, 4, 2),
    ("dense_bias", 128): Tile(64, 64, 4, 1),
    ("dense_bias", 256): Tile(32, 32, 4, 1),
}

_SMALL = _LARGE | {  # sm_86, sm_89, sm_120: about 99 KB
    ("forward", 128): Tile(64, 64, 4, 2),
    ("forward", 256): Tile(32, 32, 4, 1),
    ("query", 128): Tile(64, 32, 4, 1),
    ("band", 128): Tile(32, 32, 4, 1),
    ("dense_bias", 128): Tile(32, 32, 4, 1),
}

_HOPPER = _LARGE | {
    ("forward", 64): Tile(128, 64, 4, 3),
    ("forward", 128): Tile(128, 64, 8, 3),
    ("forward", 256): Tile(128, 64, 8, 2),
    ("key_value", 64): Tile(64, 64, 4, 2),
    ("key_value", 128): Tile(64, 64, 4, 2),
    ("key_value", 256): Tile(32, 64, 8, 1),
    ("query", 64): Tile(64, 64, 4, 2),
    ("query", 128): Tile(128, 64, 8, 3),
    ("query", 256): Tile(64, 32, 4, 1),
    ("band", 64): Tile(64, 64, 4, 3),
    ("band", 128): Tile(64, 64, 4, 2),
}

_TABLES = {80: _LARGE, 86: _SMALL, 89: _SMALL, 90: _HOPPER, 100: _LARGE, 120: _SMALL}

# True float32 has no matrix unit: small tiles keep the operands in registers.
_FLOAT32 = {
    16: Tile(32, 32, 4, 1),
    32: Tile(32, 32, 4, 1),
    64: Tile(32, 32, 4, 1),
    128: Tile(16, 16, 4, 1),
    256: Tile(16, 16, 4, 1),
}

_FALLBACKS = (Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(16, 16, 4, 1))


def table_architecture(capability: int) -> int:
    """Return the architecture whose table serves a card of this compute capability (times ten)."""
    return max((known for known in _TABLES if known <= capability), default=80)


def preferred_tile(kernel: str, capability: int, block_d: int, itemsize: int) -> Tile:
    """Return the table's tile for a kernel, a compute capability (times ten), a padded head dimension and type size."""
    if itemsize > 2:
        return _FLOAT32[block_d]
    return _TABLES[table_architecture(capability)][kernel, block_d]


def fallbacks(tile: Tile) -> list[Tile]:
    """Return the tile and then smaller ones, for cards where it does not fit."""
    smaller = [t for t in _FALLBACKS if t.queries * t.keys < tile.queries * tile.keys or t.stages < tile.stages]
    return [tile, *smaller]


def table_rows() -> list[tuple[int, str, int, int, Tile]]:
    """Return every row: architecture, kernel, padded head dimension, type size, tile."""
    rows = []
    for architecture, table in _TABLES.items():
        rows += [(architecture, kernel, block_d, 2, tile) for (kernel, block_d), tile in table.items()]
        rows += [(architecture, kernel, block_d, 4, tile) for kernel in KERNELS for block_d, tile in _FLOAT32.items()]
    return rows
