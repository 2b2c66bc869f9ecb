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
from fat5.ops import gated_gelu, joined_gated_gelu
from fat5.ops.activation.reference import gated_gelu_reference

NAMES = ("compile", "eager", "liger", "fat5-triton")
YARDSTICK = "compile"


def operators(
    rows: int, widths: Sequence[int], dtypes: Sequence[str], device: torch.device
) -> Iterator[tuple[Operator, list[Implementation]]]:
    """Yield the tanh form of two projections, of halves of one, and of one as a whole, and the exact form, with who
    computes them."""
    for dtype in dtypes:
        for width in widths:
            for approximate, layout in (("tanh", "apart"), ("tanh", "halves"), ("tanh", "joined"), ("none", "apart")):
                generator = torch.Generator(device).manual_seed(0)
                normal = functools.partial(torch.randn, generator=generator, device=device, dtype=DTYPES[dtype])
                both = normal(rows, 2 * width)
                halves = dict(zip(("gate", "up"), both.chunk(2, dim=-1), strict=True))
                inputs = {
                    "apart": {name: half.contiguous() for name, half in halves.items()},
                    "halves": halves,
                    "joined": {"both": both},
                }[layout]
                grad = normal(rows, width)
                columns = {"rows": rows, "width": width, "approximate": approximate, "layout": layout}
                operator = Operator(
                    columns | {"dtype": dtype},
                    functools.partial(_reference, approximate=approximate),
                    inputs,
                    {"out": grad},
                    forward_bytes=moved_bytes(both, grad),
                    backward_bytes=moved_bytes(both, grad, both),
                )
                plain = functools.partial(_torch, approximate=approximate)
                function = joined_gated_gelu if layout == "joined" else gated_gelu
                own = functools.partial(function, approximate=approximate, backend="triton")
                implementations = [
                    Implementation(YARDSTICK, plain, compiled=True),
                    Implementation("eager", plain),
                    Implementation("fat5-triton", own, unavailable=own_unavailable()),
                ]
                if approximate == "tanh":  # Liger-Kernel's form
                    implementations.insert(2, Implementation("liger", _liger, unavailable=needs_liger()))
                yield operator, implementations


def _pair(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return inputs if len(inputs) == 2 else inputs[0].chunk(2, dim=-1)


def _reference(*inputs: Tensor, approximate: str) -> Tensor:
    gate, up = _pair(inputs)
    return gated_gelu_reference(gate, up, approximate=approximate)


def _torch(*inputs: Tensor, approximate: str) -> Tensor:
    gate, up = _pair(inputs)
    return F.gelu(gate, approximate=approximate) * up


def _liger(*inputs: Tensor) -> Any:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return LigerGELUMulFunction.apply(*_pair(inputs))
