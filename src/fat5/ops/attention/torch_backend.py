"""The `torch` backend: runs anywhere PyTorch does.

Lengths and offsets are read on the host, which costs a synchronisation on a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fat5.ops.attention.bias_blocks import AlibiBlocks, BiasBlocks, DenseBlocks, DistanceBlocks
from fat5.ops.attention.blockwise import Dropout, Sequences, attend, attend_backward
from fat5.ops.attention.problem import Gradients, Problem, accumulation_dtype


def _dropout(problem: Problem) -> Dropout | None:
    if problem.dropout_p == 0 or problem.seed is None:
        return None
    return Dropout(problem.dropout_p, int(problem.seed))


def _bias_blocks(bias: Tensor | None, kind: str, dtype: torch.dtype, grad: Tensor | None) -> BiasBlocks:
    if bias is None:
        return BiasBlocks()
    if kind == "distance":
        return DistanceBlocks(grad, table=bias.to(dtype))
    if kind in ("alibi", "alibi-signed"):
        return AlibiBlocks(grad, slopes=bias.to(dtype), symmetric=kind == "alibi")
    return DenseBlocks(grad, tensor=bias)


def _boundaries(name: str, cu_seqlens: Tensor | None, total: int) -> list[int]:
    if cu_seqlens is None:
        raise ValueError(f"got no {name}; packed attention needs cu_seqlens_q and cu_seqlens_k")
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or any(a > b for a, b in itertools.pairwise(offsets)) or offsets[-1] > total:
        raise ValueError(
            f"got {name}={offsets[:8]}{'...' if len(offsets) > 8 else ''} for {total} rows; "
            f"expected offsets that start at 0, never fall and end at {total} or before"
        )
    return offsets


class _Group(NamedTuple):
    """Sequences of equal geometry, and where their queries and keys lie in the inputs."""

    where_q: tuple[slice]
    where_k: tuple[slice]
    sequences: Sequences


def _sequences(q: Tensor, k: Tensor, v: Tensor, bias: BiasBlocks, problem: Problem) -> Iterator[_Group]:
    return (_documents if problem.cu_seqlens_q is not None else _padded)(q, k, v, bias, problem)


def _documents(q: Tensor, k: Tensor, v: Tensor, bias: BiasBlocks, problem: Problem) -> Iterator[_Group]:
    """Yield each document of a packed batch that has queries and keys."""
    dtype, dropout = accumulation_dtype(q.dtype), _dropout(problem)
    q_bounds = _boundaries("cu_seqlens_q", problem.cu_seqlens_q, q.shape[0])
    k_bounds = _boundaries("cu_seqlens_k", problem.cu_seqlens_k, k.shape[0])
    offsets = [problem.offset] * (len(q_bounds) - 1) if problem.offsets is None else problem.offsets.tolist()
    for n, offset in enumerate(offsets):
        where_q, where_k = slice(*q_bounds[n : n + 2]), slice(*k_bounds[n : n + 2])
        num_queries, num_keys = where_q.stop - where_q.start, where_k.stop - where_k.start
        if num_queries == 0 or num_keys == 0:
            continue
        yield _Group(
            (where_q,),
            (where_k,),
            Sequences(
                q=q[where_q].to(dtype).transpose(0, 1)[None],
                k=k[where_k].to(dtype).transpose(0, 1)[None],
                v=v[where_k].to(dtype).transpose(0, 1)[None],
                offset=num_keys - num_queries if offset is None else offset,
                causal=problem.causal,
                scale=problem.softmax_scale,
                bias=bias,
                dropout=dropout,
                query_ids=torch.arange(where_q.start, where_q.stop, device=q.device)[None] if dropout else None,
                key_ids=torch.arange(where_k.start, where_k.stop, device=q.device)[None] if dropout else None,
            ),
        )


def _padded(q: Tensor, k: Tensor, v: Tensor, bias: BiasBlocks, problem: Problem) -> Iterator[_Group]:
    """Yield the whole padded batch, or its rows one by one where each has an offset of its own."""
    batch, num_queries, num_keys = q.shape[0], q.shape[1], k.shape[1]
    dtype, device, dropout = accumulation_dtype(q.dtype), q.device, _dropout(problem)
    starts, lengths = problem.key_starts, problem.key_lengths
    ends = None
    if starts is not None or lengths is not None:
        starts = torch.zeros(batch, dtype=torch.int64, device=device) if starts is None else starts
        ends = torch.full_like(starts, num_keys) if lengths is None else starts + lengths
        keys = torch.arange(num_keys, device=device)
        real = ((keys >= starts[:, None]) & (keys < ends[:, None]))[:, :, None, None]
        k, v = torch.where(real, k, 0), torch.where(real, v, 0)  # an unused slot may hold NaN
    groups: list[tuple[slice, int]] = [(slice(0, batch), problem.offset or 0)]
    if problem.offsets is not None:
        groups = [(slice(b, b + 1), offset) for b, offset in enumerate(problem.offsets.tolist())]
    for rows, offset in groups:
        row = torch.arange(batch, device=device)[rows, None]
        yield _Group(
            (rows,),
            (rows,),
            Sequences(
                q=q[rows].to(dtype).transpose(1, 2),
                k=k[rows].to(dtype).transpose(1, 2),
                v=v[rows].to(dtype).transpose(1, 2),
                offset=offset,
                causal=problem.causal,
                scale=problem.softmax_scale,
                bias=bias.rows_of_batch(rows),
                starts=None if starts is None else starts[rows],
                ends=None if ends is None else ends[rows],
                dropout=dropout,
                query_ids=row * num_queries + torch.arange(num_queries, device=device) if dropout else None,
                key_ids=row * num_keys + torch.arange(num_keys, device=device) if dropout else None,
            ),
        )


def _lse_view(lse: Tensor, where: tuple[slice, ...], packed: bool) -> Tensor:
    return lse[:, where[0]][None] if packed else lse[where]


def run_forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return the output, shaped as q, and the log-sum-exp, natural logarithm; see `custom_ops.define_ops`."""
    q, k, v, dtype = problem.q, problem.k, problem.v, accumulation_dtype(problem.q.dtype)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full(problem.lse_shape, torch.inf, dtype=dtype, device=q.device)
    bias = _bias_blocks(problem.bias, problem.bias_kind, dtype, None)
    for where, _, seqs in _sequences(q, k, v, bias, problem):
        local_out, local_lse = attend(seqs)
        out[where] = local_out.transpose(1, 2).reshape(out[where].shape).to(q.dtype)
        _lse_view(lse, where, problem.packed).copy_(local_lse)
    return out, lse


def run_backward(
    problem: Problem, grad_out: Tensor, out: Tensor, lse: Tensor, bias_grad: bool, gradients: Gradients
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Write the gradients of q, k and v, and return them and, if asked for, that of the bias in its type."""
    q, k, v, bias = problem.q, problem.k, problem.v, problem.bias
    totals = [x.zero_() for x in gradients]
    grad_bias = torch.zeros(bias.shape, dtype=lse.dtype, device=q.device) if bias is not None and bias_grad else None
    blocks = _bias_blocks(bias, problem.bias_kind, lse.dtype, grad_bias)
    for where, where_k, seqs in _sequences(q, k, v, blocks, problem):
        local = (x[where].to(lse.dtype) for x in (out, grad_out))
        local_out, local_grad = (x[None] if problem.packed else x for x in local)
        grads = attend_backward(
            seqs, local_out.transpose(1, 2), _lse_view(lse, where, problem.packed), local_grad.transpose(1, 2)
        )
        for total, place, grad in zip(totals, (where, where_k, where_k), grads, strict=True):
            total[place] = grad.transpose(1, 2).reshape(total[place].shape).to(total.dtype)
    grad_q, grad_k, grad_v = totals
    return grad_q, grad_k, grad_v, grad_bias.to(bias.dtype) if bias is not None and grad_bias is not None else None
