"""Choosing tiles by measurement, behind an environment variable: for those who add a card to the table.

`FAT5_AUTOTUNE=1` times every candidate at the first call of each configuration and prints the row that `tiles.py` would
hold. Never on by default: it runs a kernel many times and costs seconds a configuration.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

import triton

from fat5.ops.attention.tiles import Call, Tile

VARIABLE = "FAT5_AUTOTUNE"


def autotuning() -> bool:
    """True if the environment asks for it."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def every_time_is_asked_for() -> bool:
    """True if the environment asks for the time of each candidate besides."""
    return os.environ.get(VARIABLE) == "all"


def _candidates(kernel: str) -> list[Tile]:
    if kernel == "decode":  # its queries are given
        return [Tile(16, n, w, s) for n, w, s in itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 4, 5))]
    sides = (32, 64, 128)
    tiles = [Tile(m, n, w, s) for m, n, w, s in itertools.product(sides, sides, (4, 8), (1, 2, 3))]
    if kernel == "query":  # the band kernel's tiles divide the query kernel's
        tiles = [t for t in tiles if t.queries % t.keys == 0]
    return tiles


def autotuned_tile(call: Call, preferred: Tile, run: Callable[[Tile], Any]) -> Tile:
    """Return the fastest tile for `run`, which may be called any number of times, and print its table row."""
    best, best_ms = preferred, float("inf")
    for tile in _candidates(call.kernel):
        try:
            ms = triton.testing.do_bench(lambda tile=tile: run(tile), warmup=5, rep=20, return_mode="median")
        except (triton.runtime.errors.OutOfResources, triton.CompilationError, RuntimeError):
            continue
        if ms < best_ms:
            best, best_ms = tile, ms
    variant = f', "{call.variants[0]}"' if call.variants else ""
    row = f'("{call.kernel}", {call.block_d}{variant}): Tile({best.queries}, {best.keys}, {best.warps}, {best.stages}),'
    print(f"{row}  # sm_{call.capability}: {best_ms:.4f} ms", file=sys.stderr)
    return best
