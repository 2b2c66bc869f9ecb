"""Launching the Hopper kernels: allocation, descriptors, grids and constants."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
from torch import Tensor

from fat5.ops.attention.document_tiles import document_tiles
from fat5.ops.attention.hopper.backward import backward_kernel
from fat5.ops.attention.hopper.configuration import KEY_TILE, Configuration
from fat5.ops.attention.hopper.descriptors import matrix_descriptor, rows_descriptor
from fat5.ops.attention.hopper.forward import forward_kernel
from fat5.ops.attention.hopper.query_gradient import query_kernel
from fat5.ops.attention.hopper.rows import finish_kernel, prepare_kernel
from fat5.ops.attention.hopper.support import radius_of
from fat5.ops.attention.hopper.table_gradient import diagonal_kernel, table_kernel
from fat5.ops.attention.hopper.work import GROUP, Work, plan_keys, plan_queries, processors
from fat5.ops.attention.problem import Problem

_LOG2E = 1.4426950408889634
_SHARES = 16  # programs that sum the near tiles of one offset and head


def constants(configuration: Configuration, kernel: str) -> dict[str, Any]:
    """Return the compile-time constants of "forward_kernel", "backward_kernel" or "query_kernel".

    Depths of the pipelines and registers were chosen by measurement on an H200; `tests/ops/hopper_gate.py` holds them
    to the card's shared memory and to few spills.
    """
    wide = configuration.head_dim == 128
    common = {
        "D": configuration.head_dim,
        "R": configuration.radius,
        "CAUSAL": configuration.causal,
        "BIAS": configuration.bias,
        "RAGGED": configuration.ragged,
        "TAILS": configuration.tails,
    }
    registers = {"CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 24}
    if kernel == "forward_kernel":
        if configuration.consumers == 3:
            registers = {"CONSUMER_REGISTERS": 160, "PRODUCER_REGISTERS": 32}
        depth = {"NC": configuration.consumers, "NQ": 1 if wide else 2, "NB": 2, "BN": KEY_TILE}
    elif kernel == "backward_kernel":
        depth = {
            "NB": 2 if wide else 3,
            "BM": 64,
            "TABLE_GRAD": configuration.table_grad,
            "ONE_PASS": configuration.one_pass,
            "ADD_NEAR": configuration.one_pass,
            "GROUP": GROUP,
            "PHASED": configuration.phased,
        }
    else:
        depth = {"NB": 2, "BN": KEY_TILE}
    return common | depth | registers


def run_forward(problem: Problem, configuration: Configuration, programs: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the output, shaped as q, and the log2-sum-exp of the scores; see `custom_ops.define_ops`.

    Args:
        problem: One that `support.refused` lets pass, with elements in it.
        configuration: Of its forward.
        programs: Most programs; by default one a multiprocessor.
    """
    problem = _readable(problem)
    q, ragged = problem.q, configuration.ragged
    with torch.cuda.device_of(q):
        # Rows of no document belong to no tile.
        out = (torch.zeros if problem.packed else torch.empty)(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(problem.lse_shape, dtype=torch.float32, device=q.device)
        if problem.packed:
            lse.fill_(torch.inf)
        rows = 64 * configuration.consumers
        programs = programs or processors(q.device)
        work = plan_queries(problem, configuration, rows, problem.num_queries, False, programs)
        forward_kernel[(work.programs,)](
            q_desc=rows_descriptor(q, 64, problem.head_dim, ragged),
            k_desc=rows_descriptor(problem.k, KEY_TILE, problem.head_dim, ragged),
            v_desc=rows_descriptor(problem.v, KEY_TILE, problem.head_dim, ragged),
            o_desc=rows_descriptor(out, 64, problem.head_dim, ragged),
            LSE=lse,
            factor=problem.softmax_scale * _LOG2E,
            **work.arguments,
            **constants(configuration, "forward_kernel"),
            num_warps=4,
        )
    return out, lse


def run_backward(
    problem: Problem,
    configuration: Configuration,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    programs: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and, if asked for, of the table in its type.

    Args:
        problem: One that `support.backward_refused` lets pass, with elements in it.
        configuration: Of its backward.
        grad_out: Gradient of the output.
        out: The forward's output.
        lse: The forward's log2-sum-exp.
        programs: Most programs; by default one a multiprocessor.
    """
    bias_dtype = None if problem.bias is None else problem.bias.dtype
    problem = _readable(problem)
    with torch.cuda.device_of(problem.q):
        programs = programs or processors(problem.q.device)
        rows = _prepare_rows(problem, configuration, grad_out, out, lse)
        grad_k, grad_v, near, far = _run_keys(problem, configuration, grad_out, rows, programs)
        if not configuration.one_pass:
            grad_q = _run_queries(problem, configuration, grad_out, rows, programs)
        else:
            grad_q = _finish_rows(problem, rows)
        grad_bias = None
        if configuration.table_grad and bias_dtype is not None:
            grad_bias = _sum_table(problem, configuration, near, far).to(bias_dtype)
    return grad_q, grad_k, grad_v, grad_bias


def _readable(problem: Problem) -> Problem:
    bias = problem.bias
    return problem if bias is None else dataclasses.replace(problem, bias=bias.float().contiguous())


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Padded arrays of the backward, [.., H, pitch], with the map of documents to tiles of 64 rows."""

    lse: Tensor
    delta: Tensor
    sums: Tensor
    pitch: int
    grid: tuple[int, int]
    tiles: Tensor | None


def _prepare_rows(problem: Problem, configuration: Configuration, grad_out: Tensor, out: Tensor, lse: Tensor) -> _Rows:
    q, heads, dim = problem.q, problem.heads, problem.head_dim
    tiles = None
    blocks = triton.cdiv(problem.num_queries, 64)
    if problem.cu_seqlens_q is not None:
        tiles = document_tiles(problem.cu_seqlens_q, problem.num_queries, 64)
        blocks = tiles.shape[0]
    pitch = 64 * blocks
    padded = problem.batch * heads * pitch
    made = torch.empty(2, padded, dtype=torch.float32, device=q.device)
    size = padded if configuration.one_pass else 64
    sums = torch.empty(size, dim, dtype=torch.float32, device=q.device)
    grid = (blocks, problem.batch * heads)
    out_batch, do_batch = (x.stride(0) if x.ndim == 4 else 0 for x in (out, grad_out))
    prepare_kernel[grid](
        out, grad_out, lse, made[0], made[1], sums, tiles, problem.cu_seqlens_q, out_batch, *out.stride()[-3:-1],
        do_batch, *grad_out.stride()[-3:-1], heads, problem.num_queries, pitch, D=dim, VARLEN=problem.packed,
        CLEAR=configuration.one_pass,
    )  # fmt: skip
    return _Rows(made[0], made[1], sums, pitch, grid, tiles)


def _finish_rows(problem: Problem, rows: _Rows) -> Tensor:
    grad_q = torch.empty(problem.q.shape, dtype=problem.q.dtype, device=problem.q.device)
    finish_kernel[rows.grid](
        rows.sums, grad_q, rows.tiles, problem.cu_seqlens_q, problem.softmax_scale, problem.heads, problem.num_queries,
        rows.pitch, D=problem.head_dim, VARLEN=problem.packed,
    )  # fmt: skip
    return grad_q


def _run_keys(
    problem: Problem, configuration: Configuration, grad_out: Tensor, rows: _Rows, programs: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of k and v, the near tiles of dS [sets, H, offsets, 64, 64] and the sums of far ones."""
    q, k, v, ragged, dim = problem.q, problem.k, problem.v, configuration.ragged, problem.head_dim
    make = torch.zeros if ragged else torch.empty  # keys that are not real belong to no tile
    grad_k, grad_v = (make(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    work = plan_keys(problem, configuration, rows.pitch, programs)
    near, far = _table_buffers(problem, configuration, work)
    backward_kernel[(work.programs,)](
        q_desc=rows_descriptor(q, 64, dim, ragged),
        k_desc=rows_descriptor(k, 64, dim, ragged),
        half_desc=rows_descriptor(k, 64, dim // 2, ragged),
        v_desc=rows_descriptor(v, 64, dim, ragged),
        do_desc=rows_descriptor(grad_out, 64, dim, ragged),
        dk_desc=rows_descriptor(grad_k, 64, dim, ragged),
        dv_desc=rows_descriptor(grad_v, 64, dim, ragged),
        sum_desc=matrix_descriptor(rows.sums, 64, dim // 2),
        near_desc=matrix_descriptor(near.view(-1, 64), 64, 64),
        Far=far,
        LSE=rows.lse,
        Delta=rows.delta,
        factor=problem.softmax_scale * _LOG2E,
        scale=problem.softmax_scale,
        slots=work.slots,
        **work.arguments,
        **constants(configuration, "backward_kernel"),
        num_warps=4,
    )
    return grad_k, grad_v, near, far


def near_offsets(configuration: Configuration) -> tuple[int, int]:
    """Return how many offsets between a block of keys and a block of queries are near, and the first, in blocks of
    64."""
    near = (configuration.radius + 62) // 64
    first = near + 1 if configuration.phased else near
    return (first + 1 if configuration.causal else first + near + 1), -first


def _table_buffers(problem: Problem, configuration: Configuration, work: Work) -> tuple[Tensor, Tensor]:
    q, heads = problem.q, problem.heads
    if not configuration.table_grad:
        return torch.empty(1, 64, 64, dtype=q.dtype, device=q.device), torch.empty(
            1, dtype=torch.float32, device=q.device
        )
    # Added up in groups, which start at 0; or stored each, which leaves those of no document unwritten.
    sets = triton.cdiv(work.slots, GROUP) if configuration.one_pass else 2 * work.slots
    make = torch.zeros if configuration.one_pass or configuration.ragged else torch.empty
    near = make(sets, heads, near_offsets(configuration)[0], 64, 64, dtype=q.dtype, device=q.device)
    make = torch.zeros if configuration.ragged else torch.empty
    return near, make(2, 2 * work.slots, heads, dtype=torch.float32, device=q.device)


def _run_queries(
    problem: Problem, configuration: Configuration, grad_out: Tensor, rows: _Rows, programs: int
) -> Tensor:
    q, ragged, dim = problem.q, configuration.ragged, problem.head_dim
    grad_q = (torch.zeros if problem.packed else torch.empty)(q.shape, dtype=q.dtype, device=q.device)
    work = plan_queries(problem, configuration, 128, rows.pitch, True, programs)
    query_kernel[(work.programs,)](
        q_desc=rows_descriptor(q, 64, dim, ragged),
        k_desc=rows_descriptor(problem.k, KEY_TILE, dim, ragged),
        v_desc=rows_descriptor(problem.v, KEY_TILE, dim, ragged),
        do_desc=rows_descriptor(grad_out, 64, dim, ragged),
        dq_desc=rows_descriptor(grad_q, 64, dim, ragged),
        LSE=rows.lse,
        Delta=rows.delta,
        factor=problem.softmax_scale * _LOG2E,
        scale=problem.softmax_scale,
        **work.arguments,
        **constants(configuration, "query_kernel"),
        num_warps=4,
    )
    return grad_q


def _sum_table(problem: Problem, configuration: Configuration, near: Tensor, far: Tensor) -> Tensor:
    """Return the table's gradient [H, 2R + 1] in float32."""
    heads, radius, device = problem.heads, configuration.radius, problem.q.device
    offsets, first_offset = near_offsets(configuration)
    sets = near.shape[0]
    phases = _phases(problem) if configuration.phased else None
    shares = _SHARES if phases is None else problem.batch
    parts = torch.empty(shares, heads, offsets, 128, dtype=torch.float32, device=device)
    diagonal_kernel[(offsets, shares, heads)](
        near, parts, sets, heads, offsets, first_offset, 2 * triton.cdiv(problem.num_keys, KEY_TILE),
        triton.cdiv(problem.num_queries, 64), (problem.offset or 0) // 64, sets // shares,
        WRITTEN=configuration.one_pass or configuration.ragged, BY_ROW=configuration.phased,
    )  # fmt: skip
    grad = torch.empty(heads, 2 * radius + 1, dtype=torch.float32, device=device)
    table_kernel[(heads,)](
        parts, far, phases, grad, shares, heads, far.shape[1], offsets, first_offset,
        SHARES=_SHARES, RADIUS=radius, WIDTH=triton.next_power_of_2(2 * radius + 1), PHASED=configuration.phased,
    )  # fmt: skip
    # The kernels take a radius of 1 at least: a table of one entry then stands for three equal ones.
    return grad if radius_of(problem) else grad.sum(1, keepdim=True)


def _phases(problem: Problem) -> Tensor:
    """Return by how much more than whole blocks of 64 each row's real keys stand apart from its queries, int32 [B]."""
    starts = torch.zeros(problem.batch, dtype=torch.int64, device=problem.q.device)
    if problem.key_starts is not None:
        starts = problem.key_starts.long().clamp(0, problem.num_keys)
    offsets = problem.offset or 0 if problem.offsets is None else problem.offsets.long()
    return ((starts - offsets) % 64).int()
