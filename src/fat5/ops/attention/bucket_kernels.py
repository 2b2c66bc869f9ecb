"""Kernels that expand T5's table of buckets by distance and sum its gradient, one launch each.

Before a short attention these small launches count: plain PyTorch makes one kernel of the expansion and four of its
gradient. The expansion lets the attention kernel behind it start early; the sum starts early behind the table's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fat5.ops.dependent_launch import dependent_launch, follower_options, gdc_launch_dependents, gdc_wait
from fat5.ops.launching import on_device

CHUNK = 256


@triton.jit
def expand_buckets_kernel(
    Table,
    Buckets,
    Expanded,
    table_row,
    table_column,
    width,
    num_buckets,
    CHUNK: tl.constexpr,
    BUCKETS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: CHUNK distances of one head; `Expanded` is [H, width]."""
    head = tl.program_id(0).to(tl.int64)
    entries = tl.arange(0, BUCKETS)
    lanes = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    # Both loads are under way at once; a load at the loaded buckets would wait for memory twice.
    column = tl.load(Table + entries * table_row + head * table_column, mask=entries < num_buckets, other=0.0)
    buckets = tl.load(Buckets + lanes, mask=lanes < width, other=0).to(tl.int32)
    if PDL:
        gdc_launch_dependents()
    tl.store(Expanded + head * width + lanes, tl.gather(column.to(tl.float32), buckets, 0), mask=lanes < width)


@triton.jit
def sum_buckets_kernel(
    Grad,
    Buckets,
    DTable,
    grad_row,
    grad_column,
    table_row,
    width,
    num_buckets,
    CHUNK: tl.constexpr,
    BUCKETS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: the gradient of one head's buckets, summed over the distances in float32 and in a fixed order."""
    if PDL:
        gdc_wait()
    head = tl.program_id(0).to(tl.int64)
    entries = tl.arange(0, BUCKETS)
    total = tl.zeros([BUCKETS], tl.float32)
    for start in range(0, width, CHUNK):
        lanes = start + tl.arange(0, CHUNK)
        buckets = tl.load(Buckets + lanes, mask=lanes < width, other=0)
        grad = tl.load(Grad + head * grad_row + lanes * grad_column, mask=lanes < width, other=0.0).to(tl.float32)
        total += tl.sum(tl.where(buckets[None, :] == entries[:, None], grad[None, :], 0.0), 1)
    tl.store(DTable + entries * table_row + head, total.to(DTable.dtype.element_ty), mask=entries < num_buckets)


def sum_chunk(num_buckets: int) -> int:
    """Return how many distances the sum takes at once, so that its table of comparisons stays in registers."""
    return max(16, min(CHUNK, 8192 // triton.next_power_of_2(num_buckets)))


@torch.library.custom_op("fat5::expand_buckets", mutates_args=())
def expand_buckets(table: Tensor, buckets: Tensor) -> Tensor:
    """Return `table[buckets].T` as float32 [H, width], for a table [num_buckets, H] in bf16, fp16 or fp32."""
    (num_buckets, heads), width = table.shape, buckets.shape[0]
    expanded = torch.empty(heads, width, dtype=torch.float32, device=table.device)
    with on_device(table):
        expand_buckets_kernel[(heads, triton.cdiv(width, CHUNK))](
            table, buckets, expanded, table.stride(0), table.stride(1), width, num_buckets, CHUNK=CHUNK,
            BUCKETS=triton.next_power_of_2(num_buckets), PDL=dependent_launch(table.device),
        )  # fmt: skip
    return expanded


@torch.library.custom_op("fat5::sum_buckets", mutates_args=())
def sum_buckets(grad: Tensor, buckets: Tensor, num_buckets: int, dtype: torch.dtype) -> Tensor:
    """Return the sums [num_buckets, H] of a gradient [H, width] over the distances of each bucket."""
    heads, width = grad.shape
    grad_table = torch.empty(num_buckets, heads, dtype=dtype, device=grad.device)
    with on_device(grad):
        sum_buckets_kernel[(heads,)](
            grad, buckets, grad_table, grad.stride(0), grad.stride(1), grad_table.stride(0), width, num_buckets,
            CHUNK=sum_chunk(num_buckets), BUCKETS=triton.next_power_of_2(num_buckets),
            PDL=dependent_launch(grad.device),
            **follower_options(grad.device),
        )  # fmt: skip
    return grad_table


@expand_buckets.register_fake
def _(table, buckets):
    return table.new_empty(table.shape[1], buckets.shape[0], dtype=torch.float32)


@sum_buckets.register_fake
def _(grad, buckets, num_buckets, dtype):
    return grad.new_empty(num_buckets, grad.shape[0], dtype=dtype)


def _keep_for_sum(ctx, inputs, output):
    table, buckets = inputs
    ctx.save_for_backward(buckets)
    ctx.num_buckets, ctx.dtype = table.shape[0], table.dtype


def _sum(ctx, grad):
    (buckets,) = ctx.saved_tensors
    return sum_buckets(grad, buckets, ctx.num_buckets, ctx.dtype), None


def _keep_for_expansion(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])
    ctx.dtype = inputs[0].dtype


def _expand(ctx, grad):
    (buckets,) = ctx.saved_tensors
    return expand_buckets(grad, buckets).to(ctx.dtype), None, None, None


expand_buckets.register_autograd(_sum, setup_context=_keep_for_sum)
sum_buckets.register_autograd(_expand, setup_context=_keep_for_expansion)
