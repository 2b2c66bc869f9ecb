"""The small kernels around attention's own: T5's table by distance, its gradient, and the statistics of rows."""

from __future__ import annotations

from collections.abc import Iterator

from fat5.ops.attention import backward, bias_gradient, bucket_kernels
from tests.ops.compilation import ARCHITECTURES, Compilation

KERNELS = {
    "expand_buckets": bucket_kernels.expand_buckets_kernel,
    "sum_buckets": bucket_kernels.sum_buckets_kernel,
    "delta": backward.delta_kernel,
    "table": bias_gradient.table_kernel,
}


def cases(everything: bool) -> list[Compilation]:
    """T5's 32 buckets on one card, or 32 to 256 of them, and every type and head dimension, on every card."""
    architectures = ARCHITECTURES if everything else (90,)
    return [case for architecture in architectures for case in _cases(architecture, everything)]


def _cases(architecture: int, everything: bool) -> Iterator[Compilation]:
    overlaps = {"PDL": architecture >= 90}
    types = ("fp32", "bf16", "fp16") if everything else ("bf16",)

    def case(kernel: str, kinds: dict[str, str | None], constants: dict[str, int | bool]) -> Compilation:
        # All but delta are too small for wide loads to matter.
        return Compilation("attention", kernel, architecture, kinds, constants, unaligned=kernel != "delta")

    for dtype in types:
        for buckets in (32, 64, 256) if everything else (32,):
            constants = {"CHUNK": bucket_kernels.CHUNK, "BUCKETS": buckets, **overlaps}
            yield case("expand_buckets", {"Table": dtype, "Buckets": "i64", "Expanded": "fp32"}, constants)
            constants = constants | {"CHUNK": bucket_kernels.sum_chunk(buckets)}
            yield case("sum_buckets", {"Grad": "fp32", "Buckets": "i64", "DTable": dtype}, constants)
        for dim in (32, 64, 128, 256) if everything else (64,):
            for table in ("fp32", None):
                kinds = {"O": dtype, "DO": dtype, "LSE": "fp32", "Stats": "fp32", "Table": table, "Log2Table": table}
                sizes = {"BM": 32, "D": dim, "BLOCK_D": dim}
                radius = {"RADIUS": 91, "WIDTH": 256} if table else {"RADIUS": 0, "WIDTH": 1}
                yield case("delta", kinds, sizes | radius)
    sums = dict.fromkeys(("Parts", "Sums", "DTable"), "fp32")
    yield case("table", sums, {"BM": 64, "RADIUS": 91, "WIDTH": 512, "CHUNK": 1024, **overlaps})
