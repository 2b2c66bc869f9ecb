"""The kernels that expand T5's table and sum its gradient."""

from __future__ import annotations

from fat5.ops.attention import bucket_kernels
from tests.ops.compilation import ARCHITECTURES, Compilation

KERNELS = {"expand_buckets": bucket_kernels.expand_buckets_kernel, "sum_buckets": bucket_kernels.sum_buckets_kernel}
_POINTERS = {"expand_buckets": ("Table", "Expanded"), "sum_buckets": ("DTable", "Grad")}


def cases(everything: bool) -> list[Compilation]:
    """Both kernels for T5's 32 buckets on one card, or 32 to 256 of them in every type on every card."""
    found = []
    for architecture in ARCHITECTURES if everything else (90,):
        for kernel, (table, by_distance) in _POINTERS.items():
            for dtype in ("fp32", "bf16", "fp16") if everything else ("fp32",):
                for buckets in (32, 64, 256) if everything else (32,):
                    kinds = {table: dtype, by_distance: "fp32", "Buckets": "i64"}
                    constants = {"CHUNK": bucket_kernels.CHUNK, "BUCKETS": buckets, "PDL": architecture >= 90}
                    # Too small for wide loads to matter.
                    found.append(Compilation("buckets", kernel, architecture, kinds, constants, unaligned=True))
    return found
