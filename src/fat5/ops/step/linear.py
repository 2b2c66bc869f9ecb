"""`step_linear`: a linear layer for the few rows of a step of decoding, with its norm and its gate."""

from __future__ import annotations

import functools
import sys

import torch
import torch.nn.functional as F
from torch import Tensor

from fat5.ops.activation import gated_gelu
from fat5.ops.kernels_or_torch import HAS_TRITON, takes_kernels
from fat5.ops.norm import add_residual, add_rms_norm, rms_norm
from fat5.ops.step.tiles import linear_tile

if HAS_TRITON:
    from fat5.ops.step.linear_launch import run_linear

MAX_INPUTS = 2048
"""Columns of the widest input: a program holds them all."""

_SHARED_MEMORY = 101_376  # bytes that a program may use on every card


def step_linear(
    x: Tensor,
    weight: Tensor,
    *,
    tokens: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    approximate: str | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Multiply a few rows with a weight in one kernel: `rms_norm(x + residual) @ weight.T`, or gated.

    With `approximate` the weight is two, one below the other, and the result is `gelu(first) * second`. Types and
    roundings are those of `add_rms_norm`, `torch.nn.functional.linear` and `gated_gelu` one after the other; what comes
    out of the gate is kept finite in float16. No gradients. The kernel is for some tens of rows, in a step that is a
    CUDA graph: there a kernel costs some microseconds whatever it does.

    Args:
        x: [rows, K]; with `tokens` the table [vocabulary, K] from which the rows are taken.
        weight: [N, K], or [2 N, K] with `approximate`; contiguous, type of x.
        tokens: int64 [rows], or None.
        residual: [rows, K] to add to x, in the type of x; not with tokens.
        norm: Gain [K] of the norm, in the type of x; None to multiply the sum as it is.
        eps: Added to the mean square.
        approximate: None, or "tanh" or "none" as in `gated_gelu`.
        backend: "auto", "torch", or "triton" for the kernel: K up to 2,048, on a GPU.

    Returns:
        The result [rows, N], and the sum [rows, K]: the rows themselves without a residual.

    Raises:
        ValueError: Shapes or types that do not fit, or an unknown backend or one that does not work.
    """
    _check(x, weight, tokens, residual, norm, approximate)
    refusal = linear_refusal(x.shape[1], x.dtype, x.device, gated=approximate is not None)
    if takes_kernels("step_linear", backend, x, refusal=refusal):
        return run_linear(x, weight, tokens, residual, norm, eps, approximate)
    x = x if tokens is None else x[tokens]
    total = x
    if norm is not None and residual is not None:
        x, total = add_rms_norm(x, residual, norm, eps, backend="torch")
    elif norm is not None:
        x = rms_norm(x, norm, eps, backend="torch")
    elif residual is not None:
        x = total = add_residual(x, residual)
    out = F.linear(x, weight)
    if approximate is not None:
        out = gated_gelu(*out.chunk(2, -1), approximate=approximate, backend="torch")
        if out.dtype == torch.float16:
            largest = torch.finfo(out.dtype).max
            out = out.clamp(-largest, largest)
    return out, total


@functools.cache
def linear_refusal(width: int, dtype: torch.dtype, device: torch.device, *, gated: bool) -> str | None:
    """Return why the kernel of `step_linear` does not take inputs of this width, or None if it does."""
    if width > MAX_INPUTS:
        return f"its kernel takes inputs of up to {MAX_INPUTS:,} columns, not {width}"
    needed = linear_tile(width, sys.maxsize, dtype.itemsize).shared_memory(dtype.itemsize, gated=gated)
    room = _SHARED_MEMORY
    if device.type == "cuda":
        room = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", room)
    return None if needed <= room else f"its kernel needs {needed:,} bytes of shared memory, and the GPU has {room:,}"


def _check(
    x: Tensor,
    weight: Tensor,
    tokens: Tensor | None,
    residual: Tensor | None,
    norm: Tensor | None,
    approximate: str | None,
) -> None:
    given = {"x": x, "weight": weight, "residual": residual, "norm": norm}
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    shapes = ", ".join(f"{name} {list(t.shape)} {t.dtype}" for name, t in tensors.items())
    if x.ndim != 2 or weight.ndim != 2 or any(t.shape[-1] != x.shape[1] for t in tensors.values()):
        raise ValueError(f"step_linear: got {shapes}; expected x [rows, K] and weight [N, K] with one K for all")
    if any(t.dtype != x.dtype or t.device != x.device for t in tensors.values()) or not x.is_floating_point():
        raise ValueError(f"step_linear: got {shapes}; expected one floating type and one device")
    if residual is not None and (tokens is not None or residual.shape != x.shape):
        raise ValueError(f"step_linear: got {shapes}; expected a residual shaped as x, and no tokens with it")
    if approximate not in (None, "tanh", "none") or (approximate is not None and weight.shape[0] % 2):
        raise ValueError(
            f"step_linear: got approximate={approximate!r} with weight {list(weight.shape)}; expected None, 'tanh' or "
            "'none', and an even number of rows for a gate"
        )
