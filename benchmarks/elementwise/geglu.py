"""Gated GELU: workloads and peers."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.attention.workload import DTYPES
from benchmarks.bandwidth import moved_bytes
from benchmarks.elementwise import needs_liger, own_unavailable
from benchmarks.operators import Implementation, Operator
from fat5.ops import gated_gelu
from fat5.ops.activation.reference import gated_gelu_reference

NAMES = ("compile", "eager", "liger", "fat5-triton")
YARDSTICK = "compile"


def operators(
    rows: int, widths: Sequence[int], dtypes: Sequence[str], device: torch.device
) -> Iterator[tuple[Operator, list[Implementation]]]:
    """Yield the tanh form of two projections, that of halves of one, and the exact form, with who computes them."""
    for dtype in dtypes:
        for width in widths:
            for approximate, layout in (("tanh", "apart"), ("tanh", "halves"), ("none", "apart")):
                generator = torch.Generator(device).manual_seed(0)
                normal = functools.partial(torch.randn, generator=generator, device=device, dtype=DTYPES[dtype])
                if layout == "halves":
                    gate, up = normal(rows, 2 * width).chunk(2, dim=-1)
                else:
                    gate, up = normal(rows, width), normal(rows, width)
                grad = normal(rows, width)
                columns = {"rows": rows, "width": width, "approximate": approximate, "layout": layout}
                operator = Operator(
                    columns | {"dtype": dtype},
                    functools.partial(gated_gelu_reference, approximate=approximate),
                    {"gate": gate, "up": up},
                    {"out": grad},
                    forward_bytes=moved_bytes(gate, up, grad),
                    backward_bytes=moved_bytes(gate, up, grad, gate, up),
                )
                plain = functools.partial(_torch, approximate=approximate)
                own = functools.partial(gated_gelu, approximate=approximate, backend="triton")
                implementations = [
                    Implementation(YARDSTICK, plain, compiled=True),
                    Implementation("eager", plain),
                    Implementation("fat5-triton", own, unavailable=own_unavailable()),
                ]
                if approximate == "tanh":  # Liger-Kernel's form
                    implementations.insert(2, Implementation("liger", _liger, unavailable=needs_liger()))
                yield operator, implementations


def _torch(gate: Tensor, up: Tensor, *, approximate: str) -> Tensor:
    return F.gelu(gate, approximate=approximate) * up


def _liger(gate: Tensor, up: Tensor) -> Any:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return LigerGELUMulFunction.apply(gate, up)
