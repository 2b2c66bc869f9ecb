"""RMS norm, alone and behind a residual addition: workloads and peers."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.attention.workload import DTYPES
from benchmarks.bandwidth import moved_bytes
from benchmarks.elementwise import needs_liger, own_unavailable
from benchmarks.operators import Implementation, Operator
from fat5.ops import add_rms_norm, rms_norm
from fat5.ops.norm.reference import rms_norm_reference

EPS = 1e-6
NAMES = ("torch", "compile", "transformers", "liger", "fat5-triton")
YARDSTICK = "torch"


TARGETS = {
    ("rms_norm 32768x512 bf16", "forward"): 0.023,
    ("rms_norm 32768x512 bf16", "backward"): 0.040,
}
"""Milliseconds to reach on one H200."""


def operators(
    rows: int, widths: Sequence[int], dtypes: Sequence[str], device: torch.device
) -> Iterator[tuple[Operator, list[Implementation]]]:
    """Yield both operations at each width and type, with who computes them."""
    for dtype in dtypes:
        for width in widths:
            generator = torch.Generator(device).manual_seed(0)
            normal = functools.partial(torch.randn, generator=generator, device=device, dtype=DTYPES[dtype])
            x, residual, grad, grad_total = (normal(rows, width) for _ in range(4))
            weight = 1 + 0.1 * normal(width)
            columns = {"rows": rows, "width": width, "dtype": dtype}
            yield (
                Operator(
                    {"operation": "rms_norm", **columns},
                    functools.partial(rms_norm_reference, eps=EPS),
                    {"x": x, "weight": weight},
                    {"y": grad},
                    forward_bytes=moved_bytes(x, grad),
                    backward_bytes=moved_bytes(x, grad, x),
                ),
                _norms(),
            )
            yield (
                Operator(
                    {"operation": "add_rms_norm", **columns},
                    _add_reference,
                    {"x": x, "residual": residual, "weight": weight},
                    {"y": grad, "total": grad_total},
                    forward_bytes=moved_bytes(x, residual, grad, grad_total),
                    backward_bytes=moved_bytes(x, grad, grad_total, x),
                ),
                _sums(),
            )


def _norms() -> list[Implementation]:
    return [
        Implementation(YARDSTICK, _torch_norm),
        Implementation("compile", _torch_norm, compiled=True),
        Implementation("transformers", _transformers_norm),
        Implementation("liger", _liger_norm, unavailable=needs_liger()),
        Implementation("fat5-triton", functools.partial(rms_norm, eps=EPS, backend="triton"), False, own_unavailable()),
    ]


def _sums() -> list[Implementation]:
    own = functools.partial(add_rms_norm, eps=EPS, backend="triton")
    return [
        Implementation(YARDSTICK, _torch_sum),
        Implementation("compile", _torch_sum, compiled=True),
        Implementation("fat5-triton", own, unavailable=own_unavailable()),
    ]


def _add_reference(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm_reference(total, weight, EPS), total


def _torch_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def _torch_sum(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, EPS), total


def _transformers_norm(x: Tensor, weight: Tensor) -> Tensor:
    """T5's norm as Transformers' layer computes it."""
    variance = x.float().square().mean(-1, keepdim=True)
    return weight * (x * torch.rsqrt(variance + EPS)).to(weight.dtype)


def _liger_norm(x: Tensor, weight: Tensor) -> Tensor:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    # offset, casting mode, and no writing into the gradient
    return LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)
