"""Tile sizes of the kernels: one table, keyed by kernel, architecture and head dimension.

A row of the table was chosen by measurement on sm_90 and by what fits elsewhere. Whatever the table says, a launch that
asks for more shared memory than the card has falls back to the next smaller tile (`fallbacks`).
"""

from __future__ import annotations

from dataclasses import dataclass

SHARED_MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory that one block may use, by architecture (compute capability times ten)."""

KERNELS = ("forward", "decode", "key_value", "query", "band", "dense_bias")


@dataclass(frozen=True)
class Tile:
    """Size of a tile of scores and how it is run.

    Args:
        queries: Rows, a power of two of at least 16; always 16 in the decode kernel.
        keys: Columns, likewise. The query kernel's `queries` is a multiple of its `keys`, the side of the band's tiles.
        warps: Warps a program.
        stages: Depth of the software pipeline.
        registers: Most registers a thread, where fewer let one more program share a multiprocessor; the compiler's
            choice if None.
        bias: Where a dense bias is loaded: "after" the product that it is added to, or "before" it. In the key-value
            kernel also "start", where the product starts from it, and "turned", after the product and key by key.
        settled: Each product of a turn of the loop is waited for in that turn.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None
    bias: str = "after"
    settled: bool = False

    def options(self) -> dict[str, int]:
        """Return what a launch passes to the compiler."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options if self.registers is None else options | {"maxnreg": self.registers}


_AMPERE = {  # sm_80: 163 KB of shared memory
    ("forward", 16): Tile(128, 64, 4, 3),
    ("forward", 32): Tile(128, 64, 4, 3),
    ("forward", 64): Tile(128, 64, 4, 3),
    ("forward", 128): Tile(128, 64, 8, 2),
    ("forward", 256): Tile(64, 64, 8, 2),
    ("decode", 16): Tile(16, 64, 4, 4),
    ("decode", 32): Tile(16, 64, 4, 4),
    ("decode", 64): Tile(16, 64, 4, 4),
    ("decode", 128): Tile(16, 64, 4, 3),
    ("decode", 256): Tile(16, 32, 4, 3),
    ("key_value", 16): Tile(64, 64, 4, 2),
    ("key_value", 32): Tile(64, 64, 4, 2),
    ("key_value", 64): Tile(32, 64, 4, 2),
    ("key_value", 128): Tile(32, 64, 4, 2),
    ("key_value", 256): Tile(32, 64, 8, 1),
    ("query", 16): Tile(64, 64, 4, 2),
    ("query", 32): Tile(64, 64, 4, 2),
    ("query", 64): Tile(64, 64, 4, 2),
    ("query", 128): Tile(64, 64, 8, 2),
    ("query", 256): Tile(64, 64, 8, 2),
    ("band", 16): Tile(64, 64, 4, 2),
    ("band", 32): Tile(64, 64, 4, 2),
    ("band", 64): Tile(64, 64, 4, 2),
    ("band", 128): Tile(64, 64, 4, 1),
    ("band", 256): Tile(64, 64, 8, 1),
    ("dense_bias", 16): Tile(64, 64, 4, 2),
    ("dense_bias", 32): Tile(64, 64, 4, 2),
    ("dense_bias", 64): Tile(32, 64, 4, 2),
    ("dense_bias", 128): Tile(64, 64, 8, 1),
    ("dense_bias", 256): Tile(64, 64, 8, 1),
}

_SMALL = _AMPERE | {  # sm_86, sm_89, sm_120: about 99 KB of shared memory
    ("forward", 128): Tile(64, 64, 4, 2),
    ("forward", 256): Tile(32, 32, 4, 1),
    ("decode", 128): Tile(16, 64, 4, 2),
    ("decode", 256): Tile(16, 32, 4, 2),
    ("query", 128): Tile(64, 64, 4, 2),
    ("query", 256): Tile(32, 32, 4, 2),
    ("band", 128): Tile(64, 64, 4, 1),
    ("band", 256): Tile(32, 32, 4, 1),
    ("dense_bias", 128): Tile(32, 32, 4, 1),
    ("dense_bias", 256): Tile(32, 32, 4, 2),
}

_BLACKWELL = _AMPERE | {  # sm_100
    ("key_value", 256): Tile(32, 64, 4, 2),
    ("query", 128): Tile(64, 64, 4, 2),
    ("query", 256): Tile(64, 64, 4, 2),
    ("dense_bias", 128): Tile(64, 64, 4, 2),
    ("dense_bias", 256): Tile(32, 64, 8, 1),
}

_HOPPER = _AMPERE | {
    ("forward", 64): Tile(64, 64, 4, 3),
    ("forward", 128): Tile(64, 64, 4, 3),
    ("forward", 256): Tile(128, 32, 8, 2),
    ("key_value", 64): Tile(64, 64, 4, 2, 168),
    ("key_value", 128): Tile(64, 64, 4, 2, 255),
    ("key_value", 256): Tile(16, 64, 8, 1),
    ("query", 64): Tile(64, 64, 4, 2),
    ("query", 128): Tile(64, 64, 4, 2),
    ("query", 256): Tile(64, 64, 8, 1),
    ("band", 64): Tile(64, 64, 4, 3),
    ("band", 128): Tile(64, 64, 4, 3),
    ("band", 256): Tile(64, 64, 8, 1),
    ("dense_bias", 64): Tile(64, 64, 4, 2, 168),
    ("dense_bias", 128): Tile(64, 128, 8, 2),
    ("dense_bias", 256): Tile(64, 64, 8, 1),
}

# Rows for some calls alone: `dense` with a dense bias, `stores` if the kernel writes its gradient besides,
# `causal`, and `tails` for whatever is not whole tiles.
_HOPPER_VARIANTS = {
    ("forward", 64, "causal"): Tile(64, 64, 4, 3, 128),
    ("key_value", 64, "causal"): Tile(32, 64, 4, 3, 128),
    ("key_value", 64, "tails"): Tile(32, 64, 4, 3),
    ("key_value", 128, "tails"): Tile(32, 64, 4, 3),
    ("query", 64, "causal"): Tile(64, 64, 4, 3, 128),
    ("query", 64, "tails"): Tile(64, 64, 4, 2),
    ("query", 128, "tails"): Tile(128, 64, 8, 3),
    ("forward", 128, "dense"): Tile(128, 64, 8, 3, None, "before", settled=True),
    ("key_value", 64, "dense"): Tile(64, 64, 4, 2, 168, "start", settled=True),
    ("key_value", 128, "dense"): Tile(32, 64, 4, 3, None, "turned"),
    ("key_value", 128, "dense tails"): Tile(32, 64, 4, 3),
    ("query", 64, "dense"): Tile(64, 32, 4, 3, None, "before", settled=True),
    ("query", 128, "dense"): Tile(64, 32, 4, 3),
    ("query", 64, "stores"): Tile(64, 32, 4, 3, None, "before", settled=True),
    ("query", 128, "stores"): Tile(64, 64, 4, 2, None, "before", settled=True),
    ("query", 128, "stores tails"): Tile(64, 32, 4, 3, None, "before", settled=True),
}

_TABLES = {80: _AMPERE, 86: _SMALL, 89: _SMALL, 90: _HOPPER, 100: _BLACKWELL, 120: _SMALL}
_VARIANTS = {90: _HOPPER_VARIANTS}

# True float32 has no matrix unit: small tiles keep the operands in registers.
_FLOAT32 = {
    16: Tile(32, 32, 4, 1),
    32: Tile(32, 32, 4, 1),
    64: Tile(32, 32, 4, 2),
    128: Tile(16, 16, 8, 1),
    256: Tile(16, 16, 8, 1),
}

_FALLBACKS = (Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(16, 16, 4, 1))


def table_architecture(capability: int) -> int:
    """Return the architecture whose table serves a card of this compute capability (times ten)."""
    return max((known for known in _TABLES if known <= capability), default=80)


@dataclass(frozen=True)
class Call:
    """What a row of the table depends on.

    Args:
        kernel: A name in `KERNELS`.
        capability: Compute capability times ten.
        block_d: Head dimension, padded to a power of two.
        itemsize: Bytes of an element of q.
        causal: Whether later keys are hidden.
        tails: Whether there is anything but whole tiles: odd lengths, padding, documents.
        dense: Whether the bias is a dense tensor.
        stores: Whether the query kernel writes the gradient of a dense bias.
    """

    kernel: str
    capability: int
    block_d: int
    itemsize: int
    causal: bool
    tails: bool
    dense: bool = False
    stores: bool = False

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the table's variants for this call, the first that has a row is taken."""
        kinds = (("stores",) if self.stores else ()) + (("dense",) if self.dense else ())
        if self.tails:
            return (*(f"{kind} tails" for kind in kinds), *kinds, "tails")
        return (*kinds, *(("causal",) if self.causal else ()))


def preferred_tile(call: Call) -> Tile:
    """Return the table's tile for a call."""
    if call.itemsize > 2:
        return _FLOAT32[call.block_d]
    architecture = table_architecture(call.capability)
    table, variants = _TABLES[architecture], _VARIANTS.get(architecture, {})
    rows = (variants.get((call.kernel, call.block_d, name)) for name in call.variants)
    return next((tile for tile in rows if tile is not None), table[call.kernel, call.block_d])


def fallbacks(tile: Tile) -> list[Tile]:
    """Return the tile and then smaller ones, for cards where it does not fit."""
    smaller = [t for t in _FALLBACKS if t.queries * t.keys < tile.queries * tile.keys or t.stages < tile.stages]
    return [tile, *smaller]


def table_rows() -> list[tuple[Call, Tile]]:
    """Return every row with a call that reads it."""
    rows = []
    for architecture, table in _TABLES.items():
        for (kernel, block_d), tile in table.items():
            rows.append((Call(kernel, architecture, block_d, 2, False, False), tile))
            rows.append((Call(kernel, architecture, block_d, 4, False, True), _FLOAT32[block_d]))
        for (kernel, block_d, name), tile in _VARIANTS.get(architecture, {}).items():
            of = name.split()
            dense = "dense" in of or "stores" in of
            call = Call(kernel, architecture, block_d, 2, "causal" in of, "tails" in of, dense, "stores" in of)
            rows.append((call, tile))
    return rows
