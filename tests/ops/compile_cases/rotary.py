"""The rotary kernel."""

from __future__ import annotations

import itertools

from fat5.ops.rotary import kernels
from fat5.ops.rotary.tiles import rotary_tile
from tests.ops.compilation import ARCHITECTURES, Compilation

KERNELS = {"rotary": kernels.rotary_kernel}


def cases(everything: bool) -> list[Compilation]:
    """Whole and part rotation of heads of many sizes, of 64 in every type, for every card; or a few on one card."""
    shapes = [("bf16", size) for size in ((16, 16), (32, 32), (64, 64), (128, 128), (256, 256), (72, 72), (64, 32))]
    shapes += [("fp16", (64, 64)), ("fp32", (64, 64))]
    chosen = shapes if everything else [("bf16", (64, 64))]
    architectures = ARCHITECTURES if everything else (90,)
    flags = itertools.product(architectures, chosen, (False, True), (False, True))
    return [_case(architecture, *shape, *rest) for architecture, shape, *rest in flags if everything or not rest[1]]


def _case(architecture: int, dtype: str, shape: tuple[int, int], interleaved: bool, inverse: bool) -> Compilation:
    width, rotated = shape
    half, rest = rotated // 2, width - rotated
    tile = rotary_tile(_power(width))
    tables = dict.fromkeys(("QCos", "QSin", "KCos", "KSin"), "fp32")
    constants = {
        "H": 8, "D": width, "HALF": half, "BLOCK_HALF": _power(half), "BLOCK_REST": _power(rest) if rest else 0,
        "ROWS": tile.rows, "INTERLEAVED": interleaved, "INVERSE": inverse,
    }  # fmt: skip
    kinds = dict.fromkeys(("Q", "K", "QOut", "KOut"), dtype) | tables
    return Compilation("rotary", "rotary", architecture, kinds, constants, tile.options(), unaligned=half % 8 != 0)


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()
