"""The RMS norm's kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from fat5.ops.norm import kernels, tiles
from tests.ops.compilation import ARCHITECTURES, Compilation

KERNELS = {
    "rms_norm forward": kernels.forward_kernel,
    "rms_norm backward": kernels.backward_kernel,
    "rms_norm weight": kernels.weight_kernel,
    "rms_norm sum": kernels.sum_kernel,
}
_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
_SPILLS_FROM = 16_384  # elements of a row: 32 a thread and more


def cases(everything: bool) -> list[Compilation]:
    """Widths of every tile, T5's in every type, for every card; or the fused kernels at two widths, on few cards."""
    if not everything:
        fused = [case for width in (512, 768) for case in _at(90, width, "bf16") if case.types.get("DH")]
        elsewhere = [case for card in (80, 86, 120) for case in _at(card, 512, "bf16") if case.types.get("DH")]
        sums = [case for case in _at(90, 512, "bf16") if case.kernel == "rms_norm sum"]
        return fused + sums + [case for case in elsewhere if case.kernel == "rms_norm backward"]
    found = []
    widths = [*(2**n for n in (4, 6, 8, 9, 10, 11, 12, 13, 14, 16)), 48, 100, 768]
    for architecture, width in itertools.product(ARCHITECTURES, widths):
        types = ("bf16", "fp16", "fp32") if width in (512, 1024) else ("bf16",)
        found += [case for dtype in types for case in _at(architecture, width, dtype)]
    return found


def _at(architecture: int, width: int, dtype: str) -> Iterator[Compilation]:
    block_d = max(16, 1 << (width - 1).bit_length())
    shape = {"D": width, "BLOCK_D": block_d}
    spills = 4096 if block_d >= _SPILLS_FROM else 16 if dtype == "bf16" else 64

    def case(kernel: str, kinds: dict, constants: dict, tile: tiles.RowTile) -> Compilation:
        rest = {"unaligned": width % 8 != 0, "max_spilled": spills}
        return Compilation("norm", kernel, architecture, kinds, constants, tile.options(), **rest)

    row = dict.fromkeys(("X", "Residual", "Y", "H", "DY", "DH", "DX"), dtype) | {"Weight": dtype, "Rstd": "fp32"}
    forward = tiles.forward_tile(block_d)
    for fused in (False, True):
        backward = tiles.backward_tile(width, _SIZES[dtype], 3 if fused else 2)
        kinds = row if fused else row | {"Residual": None}
        clamp = fused and dtype == "fp16"
        constants = shape | {"ROWS": forward.rows, "CLAMP": clamp}
        yield case("rms_norm forward", kinds | {"eps": "fp32"}, constants, forward)
        parts = "fp32" if block_d <= tiles.MAX_FUSED_WIDTH else None
        kinds = row | {"Parts": parts, "DH": dtype if fused else None}
        constants = shape | {"ROWS": backward.rows, "COLUMNS": min(block_d, tiles.LANES_BYTES // _SIZES[dtype])}
        constants |= {
            "AHEAD": backward.stages > 1,
            "UNROLL": backward.unroll,
            "CLAMP": clamp,
            "LEADS": architecture >= 90 and parts is not None,
        }
        yield case("rms_norm backward", kinds, constants, backward)
    if block_d > tiles.MAX_FUSED_WIDTH:
        constants = {"D": width, "COLUMNS": tiles.WEIGHT_COLUMNS, "ROWS": tiles.WEIGHT_TILE.rows}
        yield case("rms_norm weight", row | {"Parts": "fp32"}, constants, tiles.WEIGHT_TILE)
    constants = {"D": width, "PARTS": tiles.MAX_SUM_PARTS, "COLUMNS": tiles.SUM_COLUMNS, "FOLLOWS": architecture >= 90}
    yield Compilation(
        "norm", "rms_norm sum", architecture, {"Parts": "fp32", "Sum": dtype}, constants, {"num_warps": tiles.SUM_WARPS}
    )
