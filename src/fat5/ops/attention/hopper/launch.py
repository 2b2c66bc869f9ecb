"""Launching the Hopper kernels: allocation, descriptors, grids and constants."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from fat5.ops.attention.hopper import plan
from fat5.ops.attention.hopper.backward import backward_kernel
from fat5.ops.attention.hopper.chain import Chain
from fat5.ops.attention.hopper.configuration import KEY_TILE, QUERY_BUFFERS, Configuration
from fat5.ops.attention.hopper.descriptors import matrix_descriptor, rows_descriptor
from fat5.ops.attention.hopper.finish import finish_kernel
from fat5.ops.attention.hopper.forward import forward_kernel
from fat5.ops.attention.hopper.plan import GROUP, Parts, planned, row_blocks
from fat5.ops.attention.hopper.query_gradient import query_kernel
from fat5.ops.attention.hopper.rows import prepare_kernel
from fat5.ops.attention.hopper.support import radius_of
from fat5.ops.attention.hopper.table_gradient import table_kernel
from fat5.ops.attention.hopper.work import Work, plan_keys, plan_queries
from fat5.ops.attention.problem import Gradients, Problem
from fat5.ops.launching import on_device, processors
from fat5.ops.prepared_launch import PreparedLaunch, PreparedLaunches, Relaunched, ceil_divide

prepare_kernel, finish_kernel, table_kernel = map(Relaunched, (prepare_kernel, finish_kernel, table_kernel))
_launches = PreparedLaunches()
_LOG2E = 1.4426950408889634
_SHARES = 16  # programs that sum the near tiles of one offset and head
_FINISH_WARPS = 8
_REVERSED = True  # rows last cleared, or last added to, lie in the L2 when the next kernel begins
_TABLE_WIDTH = 64  # entries of the table's gradient that one program writes


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
        shape = configuration.shape
        if shape.consumers == 3:
            registers = {"CONSUMER_REGISTERS": 160, "PRODUCER_REGISTERS": 32}
        depth = {
            "NC": shape.consumers,
            "NQ": QUERY_BUFFERS,
            "NB": shape.stages,
            "BN": KEY_TILE,
            "AHEAD": shape.ahead,
            "ALTERNATE": shape.alternate,
            "HALVES": configuration.halves,
        }
    elif kernel == "backward_kernel":
        depth = {
            "NB": 2 if wide else 3,
            "NKV": 1 if wide else 2,
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
    with on_device(q):
        out = q.new_empty(q.shape)
        lse = q.new_empty(problem.lse_shape, dtype=torch.float32)
        rows = 64 * configuration.shape.consumers
        programs = programs or processors(q.device)
        chain = Chain(q.device)
        parts = planned(problem, programs)
        work = plan_queries(problem, configuration, rows, problem.num_queries, False, programs, chain, parts)
        launch = _prepared("forward_kernel", forward_kernel, problem, configuration, work, chain)
        launch(
            rows_descriptor(q, 64, problem.head_dim, ragged),
            rows_descriptor(problem.k, KEY_TILE, problem.head_dim, ragged),
            rows_descriptor(problem.v, KEY_TILE, problem.head_dim, ragged),
            rows_descriptor(out, 64, problem.head_dim, ragged),
            work.table,
            lse,
            work.records,
        )
    return out, lse


def _prepared(
    name: str, kernel: Any, problem: Problem, configuration: Configuration, work: Work, chain: Chain, **others: Any
) -> PreparedLaunch:
    """Return the next launch of a persistent kernel, for its tensors in the order of its parameters.

    `others` are scalars that follow from the problem and the configuration.
    """
    options = chain.start()

    def prepare() -> PreparedLaunch:
        return PreparedLaunch(
            kernel, (work.programs,), factor=problem.softmax_scale * _LOG2E, **others, **work.scalars,
            **constants(configuration, name), num_warps=4, **options,
        )  # fmt: skip

    return _launches.get((id(kernel), problem.signature, configuration, work.programs, bool(options)), prepare)


def run_backward(
    problem: Problem,
    configuration: Configuration,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    gradients: Gradients,
    programs: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Write the gradients of q, k and v, and return them and, if asked for, that of the table in its type.

    Args:
        problem: One that `support.backward_refused` lets pass, with elements in it.
        configuration: Of its backward.
        grad_out: Gradient of the output.
        out: The forward's output.
        lse: The forward's log2-sum-exp.
        gradients: Where those of q, k and v go, with strides that TMA takes.
        programs: Most programs; by default one a multiprocessor.
    """
    bias_dtype = None if problem.bias is None else problem.bias.dtype
    problem = _readable(problem)
    with on_device(problem.q):
        programs = programs or processors(problem.q.device)
        parts = planned(problem, programs)
        rows = _padded_rows(problem, configuration, parts)
        chain = Chain(problem.q.device)
        queries = None
        if not configuration.one_pass:
            queries = plan_queries(problem, configuration, 128, rows.pitch, True, programs, chain, parts)
        keys = plan_keys(problem, configuration, rows.pitch, programs, chain, parts, rows.map)
        table = _table_sums(problem, configuration, keys)
        _prepare_rows(problem, configuration, grad_out, out, lse, rows, table, gradients, chain)
        _run_keys(problem, configuration, grad_out, rows, keys, table, gradients, chain)
        if queries is not None:
            _run_queries(problem, configuration, grad_out, rows, queries, gradients, chain)
        grad_bias = _finish(problem, configuration, rows, table, gradients, chain)
        if grad_bias is not None and bias_dtype is not None:
            grad_bias = grad_bias.to(bias_dtype)
    return *gradients, grad_bias


def plan_size(problem: Problem, *, backward: bool) -> int:
    """Return the length of a plan, 0 where there is nothing to plan."""
    return plan.size(problem, processors(problem.q.device), backward=backward)


def make_plan(problem: Problem, *, backward: bool) -> Tensor:
    """Return a plan of calls with this problem's sizes, lengths and bias; see `plan.py`."""
    with on_device(problem.q):
        return plan.make(_readable(problem), processors(problem.q.device), backward=backward)


def _readable(problem: Problem) -> Problem:
    bias = problem.bias
    if bias is None or (bias.dtype == torch.float32 and bias.is_contiguous()):
        return problem
    return dataclasses.replace(problem, bias=bias.float().contiguous())


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Padded arrays of the backward, [.., H, pitch], and the map of their blocks of 64 rows to packed ones."""

    lse: Tensor
    delta: Tensor
    sums: Tensor
    pitch: int
    blocks: int
    map: Tensor | None


@dataclasses.dataclass(frozen=True)
class _TableSums:
    """Near tiles of dS [sets, H, offsets, 64, 64], and the sums of far ones [2, 2 * slots, H]."""

    near: Tensor
    far: Tensor
    slots: int


def _padded_rows(problem: Problem, configuration: Configuration, parts: Parts) -> _Rows:
    blocks = row_blocks(problem)
    row_map = parts.get("map")
    if row_map is None and problem.packed:
        row_map = torch.empty(blocks, 2, dtype=torch.int32, device=problem.q.device)
    pitch = 64 * blocks
    padded = problem.batch * problem.heads * pitch
    made = problem.q.new_empty(2, padded, dtype=torch.float32)
    size = padded if configuration.one_pass else 64
    sums = problem.q.new_empty(size, problem.head_dim, dtype=torch.float32)
    return _Rows(made[0], made[1], sums, pitch, blocks, row_map)


def near_offsets(configuration: Configuration) -> tuple[int, int]:
    """Return how many offsets between a block of keys and a block of queries are near, and the first, in blocks of
    64."""
    near = (configuration.radius + 62) // 64
    first = near + 1 if configuration.phased else near
    return (first + 1 if configuration.causal else first + near + 1), -first


def _table_sums(problem: Problem, configuration: Configuration, work: Work) -> _TableSums:
    q, heads = problem.q, problem.heads
    if not configuration.table_grad:
        near = torch.empty(0, 64, 64, dtype=q.dtype, device=q.device)
        return _TableSums(near, torch.empty(1, dtype=torch.float32, device=q.device), work.slots)
    # Added up in groups; or stored each, those of no sequence left unwritten. The preparing kernel clears both kinds.
    sets = ceil_divide(work.slots, GROUP) if configuration.one_pass else 2 * work.slots
    near = torch.empty(sets, heads, near_offsets(configuration)[0], 64, 64, dtype=q.dtype, device=q.device)
    far = torch.empty(2, 2 * work.slots, heads, dtype=torch.float32, device=q.device)
    return _TableSums(near, far, work.slots)


def _prepare_rows(
    problem: Problem, configuration: Configuration, grad_out: Tensor, out: Tensor, lse: Tensor, rows: _Rows,
    table: _TableSums, gradients: Gradients, chain: Chain,
) -> None:  # fmt: skip
    _, grad_k, grad_v = gradients
    starts, lengths = problem.key_starts, problem.key_lengths
    grad_batch = grad_k.stride(0) if grad_k.ndim == 4 else 0
    programs = rows.blocks * problem.batch * problem.heads
    out_batch, do_batch = (x.stride(0) if x.ndim == 4 else 0 for x in (out, grad_out))
    near, far = 0, 0
    if configuration.table_grad:
        near = table.near.numel() if configuration.one_pass or configuration.ragged else 0
        far = table.far.numel() if configuration.ragged else 0
    prepare_kernel[(programs,)](
        out, grad_out, lse, rows.lse, rows.delta, rows.sums, table.near, table.far, rows.map, near,
        ceil_divide(near, 1024 * programs), far, ceil_divide(far, 1024 * programs), out_batch, *out.stride()[-3:-1],
        do_batch, *grad_out.stride()[-3:-1], problem.heads, problem.num_queries, rows.blocks, grad_k, grad_v,
        grad_batch, *grad_k.stride()[-3:-1], starts, lengths, problem.num_keys, D=problem.head_dim,
        VARLEN=problem.packed, CLEAR=configuration.one_pass, HAS_STARTS=starts is not None,
        HAS_LENGTHS=lengths is not None, REVERSED=_REVERSED, **chain.link(),
    )  # fmt: skip


def _run_keys(
    problem: Problem, configuration: Configuration, grad_out: Tensor, rows: _Rows, work: Work, table: _TableSums,
    gradients: Gradients, chain: Chain,
) -> None:  # fmt: skip
    q, k, v, ragged, dim = problem.q, problem.k, problem.v, configuration.ragged, problem.head_dim
    _, grad_k, grad_v = gradients
    # A descriptor has memory behind it, also where nothing is stored.
    near = table.near if configuration.table_grad else rows.sums.view(q.dtype)
    launch = _prepared(
        "backward_kernel", backward_kernel, problem, configuration, work, chain, scale=problem.softmax_scale,
        slots=work.slots,
    )  # fmt: skip
    launch(
        rows_descriptor(q, 64, dim, ragged),
        rows_descriptor(k, 64, dim, ragged),
        rows_descriptor(k, 64, dim // 2, ragged),
        rows_descriptor(v, 64, dim, ragged),
        rows_descriptor(grad_out, 64, dim, ragged),
        rows_descriptor(grad_k, 64, dim, ragged),
        rows_descriptor(grad_v, 64, dim, ragged),
        matrix_descriptor(rows.sums, 64, dim // 2),
        matrix_descriptor(near.view(-1, 64), 64, 64),
        work.table,
        table.far,
        rows.lse,
        rows.delta,
        work.records,
    )


def _run_queries(
    problem: Problem, configuration: Configuration, grad_out: Tensor, rows: _Rows, work: Work,
    gradients: Gradients, chain: Chain,
) -> None:  # fmt: skip
    ragged, dim = configuration.ragged, problem.head_dim
    launch = _prepared("query_kernel", query_kernel, problem, configuration, work, chain, scale=problem.softmax_scale)
    launch(
        rows_descriptor(problem.q, 64, dim, ragged),
        rows_descriptor(problem.k, KEY_TILE, dim, ragged),
        rows_descriptor(problem.v, KEY_TILE, dim, ragged),
        rows_descriptor(grad_out, 64, dim, ragged),
        rows_descriptor(gradients[0], 64, dim, ragged),
        work.table,
        rows.lse,
        rows.delta,
        work.records,
    )


def _finish(
    problem: Problem, configuration: Configuration, rows: _Rows, table: _TableSums,
    gradients: Gradients, chain: Chain,
) -> Tensor | None:  # fmt: skip
    """Write the gradient of q from its sums, and return the table's [H, 2R + 1] in float32 if it is asked for."""
    heads, radius = problem.heads, configuration.radius
    offsets, first_offset = near_offsets(configuration)
    sets = table.near.shape[0]
    phases = None
    if configuration.phased and configuration.table_grad:
        phases = _phases(problem)
        chain.end()
    shares = _SHARES if phases is None else problem.batch
    parts = problem.q.new_empty(shares, heads, offsets, 128, dtype=torch.float32)
    diagonals = offsets * shares * heads if configuration.table_grad else 0
    pieces = rows.blocks * problem.batch * heads if configuration.one_pass else 0
    grad_q = gradients[0]
    grad_batch = grad_q.stride(0) if grad_q.ndim == 4 else 0
    if diagonals + pieces:
        finish_kernel[(diagonals + pieces,)](
            rows.sums, grad_q, grad_batch, *grad_q.stride()[-3:-1], rows.map, problem.softmax_scale, rows.blocks,
            heads, problem.num_queries, table.near, parts, diagonals, shares, sets, offsets, first_offset,
            2 * ceil_divide(problem.num_keys, KEY_TILE), ceil_divide(problem.num_queries, 64),
            (problem.offset or 0) // 64, sets // shares, D=problem.head_dim, VARLEN=problem.packed,
            WRITTEN=configuration.one_pass or configuration.ragged, BY_ROW=configuration.phased, REVERSED=_REVERSED,
            num_warps=_FINISH_WARPS, **chain.link(),
        )  # fmt: skip
    if not configuration.table_grad:
        return None
    grad = problem.q.new_empty(heads, 2 * radius + 1, dtype=torch.float32)
    table_kernel[(ceil_divide(2 * radius + 1, _TABLE_WIDTH), heads)](
        parts, table.far, phases, grad, shares, heads, table.far.shape[1], first_offset,
        SHARES=_SHARES, RADIUS=radius, OFFSETS=offsets, WIDTH=_TABLE_WIDTH, PHASED=configuration.phased,
        **chain.link(),
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
