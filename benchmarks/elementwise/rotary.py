"""Rotary embedding of queries and keys: workloads and peers."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.workload import DTYPES
from benchmarks.bandwidth import moved_bytes
from benchmarks.elementwise import needs_liger, own_unavailable
from benchmarks.operators import Implementation, Operator
from fat5.ops import apply_rotary_qk, rotary_phases

NAMES = ("compile", "eager", "liger", "fat5-triton")
YARDSTICK = "compile"
LENGTH, HEADS = 1024, 8


def operators(
    tokens: int, head_dims: Sequence[int], dtypes: Sequence[str], device: torch.device
) -> Iterator[tuple[Operator, list[Implementation]]]:
    """Yield rotations of rows of 1,024 tokens, both forms, with who computes them; tables are made before."""
    for dtype in dtypes:
        for head_dim in head_dims:
            length = min(tokens, LENGTH)
            generator = torch.Generator(device).manual_seed(0)
            shape = (tokens // length, length, HEADS, head_dim)
            normal = functools.partial(torch.randn, shape, generator=generator, device=device, dtype=DTYPES[dtype])
            q, k, grad_q, grad_k = (normal() for _ in range(4))
            cos, sin = rotary_phases(torch.arange(length, device=device), head_dim)
            for interleaved in (False, True):
                own = functools.partial(apply_rotary_qk, cos=cos, sin=sin, interleaved=interleaved)
                columns = {"tokens": tokens, "heads": HEADS, "head_dim": head_dim}
                bytes_moved = moved_bytes(q, k, grad_q, grad_k, cos, sin)
                operator = Operator(
                    columns | {"interleaved": interleaved, "dtype": dtype},
                    _reference(cos, sin, interleaved),
                    {"q": q, "k": k},
                    {"q_out": grad_q, "k_out": grad_k},
                    forward_bytes=bytes_moved,
                    backward_bytes=bytes_moved,
                )
                plain = functools.partial(own, backend="torch")
                implementations = [
                    Implementation(YARDSTICK, plain, compiled=True),
                    Implementation("eager", plain),
                    Implementation("fat5-triton", functools.partial(own, backend="triton"), False, own_unavailable()),
                ]
                if not interleaved:  # Liger-Kernel's pairs are halves
                    implementations.insert(2, Implementation("liger", _liger(cos, sin), unavailable=needs_liger()))
                yield operator, implementations


def _reference(cos: Tensor, sin: Tensor, interleaved: bool) -> Any:
    def rotate(*tensors: Tensor) -> tuple[Tensor, ...]:
        turned = []
        for x in tensors:
            pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
            first, second = pairs.unbind(-1)
            c, s = (table[:, None, :].to(x.dtype) for table in (cos, sin))
            both = torch.stack((first * c - second * s, second * c + first * s), -1)
            turned.append(both.flatten(-2) if interleaved else both.transpose(-1, -2).flatten(-2))
        return tuple(turned)

    return rotate


def _liger(cos: Tensor, sin: Tensor) -> Any:
    tables = [torch.cat((x, x), -1)[None] for x in (cos, sin)]

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        from liger_kernel.ops.rope import LigerRopeFunction

        q, k = LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), *tables)
        return q.transpose(1, 2), k.transpose(1, 2)

    return rotate
