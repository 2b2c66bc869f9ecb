"""The cross-entropies' kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from fat5.ops.loss import kernels
from fat5.ops.loss.paired_rows import paired_row_kernel
from fat5.ops.loss.tiles import MAX_PAIRED_COLUMNS, Tile, candidates, preferred_tile
from tests.ops.compilation import ARCHITECTURES, Compilation

KERNELS = {
    "loss pairs": paired_row_kernel,
    "loss blocks": kernels.row_kernel,
    "loss gradient": kernels.gradient_kernel,
    "loss scale": kernels.scale_kernel,
    "loss scaled": kernels.scaled_kernel,
    "loss labels": kernels.labels_kernel,
    "loss sums": kernels.sums_kernel,
}
_TYPES = {"Labels": "i64", "Count": "i64", "Correct": "i8", "Valid": "i8", "smoothing": "fp32", "z_weight": "fp32"}
_TYPES |= dict.fromkeys(("Loss", "ZLoss", "LSE", "Grad", "LossSum", "ZSum"), "fp32")
_MAX_SPILLED_CANDIDATE = 512
_MAX_SPILLED = 32  # of the paired kernel, whose cap on registers lets two rows share a multiprocessor


def cases(everything: bool) -> list[Compilation]:
    """Every tile worth measuring, for every card, type and flag; or the preferred ones in bf16 on one card."""
    architectures = ARCHITECTURES if everything else (90,)
    types = ("bf16", "fp16", "fp32") if everything else ("bf16",)
    found = list(itertools.chain.from_iterable(_at(*case) for case in itertools.product(architectures, types)))
    if everything:
        found += itertools.chain.from_iterable(_candidates(kernel) for kernel in ("pairs", "blocks"))
    else:
        found = [x for x in found if x.constants["BLOCK"] != 2048 and x.constants.get("GRADIENT", True)]
    return list({str(x): x for x in found}.values())  # lengths may share a tile


def _at(architecture: int, dtype: str) -> Iterator[Compilation]:
    for size, gradient in itertools.product((2048, 32_768, 65_536, 32_128, 32_130, 50_257, 250_112), (True, False)):
        if dtype == "bf16" and size % 2 == 0 and size <= MAX_PAIRED_COLUMNS:
            yield _rows("pairs", architecture, dtype, size, gradient)
        yield _rows("blocks", architecture, dtype, size, gradient)
    kinds = _TYPES | {"X": dtype, "G": dtype}
    for size in (32_768, 32_128, 50_257):
        tile = preferred_tile("gradient", size)
        constants = {"BLOCK": tile.columns, "EVEN": size % tile.columns == 0}
        options = tile.options()
        yield Compilation("loss", "loss gradient", architecture, kinds, constants, options, unaligned=size % 16 != 0)
    yield Compilation("loss", "loss scale", architecture, kinds, {"BLOCK": 4096}, unaligned=True)
    scaled = kinds | {"X": "fp32", "Y": dtype}
    yield Compilation("loss", "loss scaled", architecture, scaled, {"BLOCK": 4096}, {"num_warps": 8}, unaligned=True)
    yield Compilation("loss", "loss labels", architecture, kinds, {"BLOCK": 4096}, {"num_warps": 8}, unaligned=True)
    constants = {"BLOCK": 4096, "MEAN": True}
    yield Compilation("loss", "loss sums", architecture, kinds, constants, {"num_warps": 8}, unaligned=True)


def _rows(
    kernel: str, architecture: int, dtype: str, size: int, gradient: bool, tile: Tile | None = None
) -> Compilation:
    """One pass over rows of a length: for the mean where whole tiles fill it, else for the sum with smoothing."""
    max_spilled = _MAX_SPILLED if tile is None else _MAX_SPILLED_CANDIDATE
    tile = tile or preferred_tile(kernel, size)
    even = size % tile.columns == 0
    constants = {"BLOCK": tile.columns, "EVEN": even, "SMOOTHED": not even, "GRADIENT": gradient, "MEAN": even}
    constants |= {"ASM": True, "PREFETCH": tile.stages > 1} if kernel == "pairs" else {"STAGES": tile.stages}
    kinds = _TYPES | {"X": "i32" if kernel == "pairs" else dtype, "G": dtype, "Count": "i64" if even else None}
    return Compilation(
        "loss", f"loss {kernel}", architecture, kinds, constants, tile.options(),
        max_spilled=max_spilled, unaligned=size % 16 != 0,
    )  # fmt: skip


def _candidates(kernel: str) -> Iterator[Compilation]:
    """The tiles that the benchmark measures; one that spills loses there by itself."""
    types = {"bf16": 2, "fp32": 4} if kernel == "blocks" else {"bf16": 2}
    for (dtype, itemsize), size in itertools.product(types.items(), (32_768, 250_112)):
        if kernel == "pairs" and size > MAX_PAIRED_COLUMNS:
            continue
        for tile in candidates(kernel, size, itemsize):
            yield _rows(kernel, 90, dtype, size, True, tile)
