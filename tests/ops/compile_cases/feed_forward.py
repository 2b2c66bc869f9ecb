"""The fused product of the gated feed-forward layer."""

from __future__ import annotations

import itertools

from fat5.ops.feed_forward import kernels
from fat5.ops.feed_forward.tiles import TILE, candidates
from tests.ops.compilation import Compilation

KERNELS = {"gated_feed_forward": kernels.forward_kernel}
_HOPPER = 90


def cases(everything: bool) -> list[Compilation]:
    """On the cards that it runs on: all types and forms, and in one of them every tile to be tried."""
    types, forms = (("bf16", "fp16"), (True, False)) if everything else (("bf16",), (True,))
    flags = list(itertools.product([TILE], types, forms, (True, False)))
    if everything:
        flags += [(tile, "bf16", True, True) for tile in candidates() if tile != TILE]
    found = []
    for tile, dtype, tanh, keep in flags:
        blocks = {
            "X": (tile.rows, tile.depth),
            "Weight": (2, tile.columns, tile.depth),
            "Joined": (tile.rows, tile.columns) if keep else None,
            "Out": (tile.rows, tile.columns),
        }
        described = {
            name: None if block is None else f"tensordesc<{dtype}[{','.join(map(str, block))}]>"
            for name, block in blocks.items()
        }
        constants = {"TANH": tanh, "BM": tile.rows, "BN": tile.columns, "BK": tile.depth, "GROUP": tile.group}
        found.append(Compilation("feed_forward", "gated_feed_forward", _HOPPER, described, constants, tile.options()))
    return found
