"""Launching the kernel of a linear layer for a few rows."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fat5.ops.attention.kernel_arguments import float32_products
from fat5.ops.dependent_launch import dependent_launch, follower_options
from fat5.ops.launching import on_device
from fat5.ops.step.linear_kernel import ERF, NOT_GATED, TANH, linear_kernel
from fat5.ops.step.tiles import BM, linear_tile

_GATES = {None: NOT_GATED.value, "tanh": TANH.value, "none": ERF.value}


def run_linear(
    x: Tensor,
    weight: Tensor,
    tokens: Tensor | None,
    residual: Tensor | None,
    norm: Tensor | None,
    eps: float,
    approximate: str | None,
) -> tuple[Tensor, Tensor]:
    """Return the result and the sum; see `step_linear`."""
    rows, width = x.shape[0] if tokens is None else tokens.shape[0], x.shape[1]
    columns = weight.shape[0] if approximate is None else weight.shape[0] // 2
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    makes_sum = residual is not None or tokens is not None
    total = torch.empty(rows, width, dtype=x.dtype, device=x.device) if makes_sum else x
    if out.numel() == 0:
        return out, total
    x = x if x.stride(1) == 1 else x.contiguous()
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    tile = linear_tile(width, columns, x.element_size())
    with on_device(out):
        linear_kernel[(triton.cdiv(columns, tile.columns), triton.cdiv(rows, BM))](
            x, tokens, residual, norm, weight.contiguous(), out, total if makes_sum else None, x.stride(0),
            0 if residual is None else residual.stride(0), rows, columns, eps,
            K=width, PARTS=tile.parts, BLOCK_K=tile.block_k, BM=BM, BN=tile.columns, GATED=_GATES[approximate],
            CLAMP=x.dtype == torch.float16, PRECISION=float32_products(),
            PDL=dependent_launch(out.device), num_warps=tile.parts, **follower_options(out.device),
        )  # fmt: skip
    return out, total
