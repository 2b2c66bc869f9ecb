"""The `torch` backend as custom ops: runs anywhere PyTorch does, opaque to torch.compile.

Lengths and offsets are read on the host inside the op, which costs a synchronisation on a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fat5.ops.attention.bias_blocks import AlibiBlocks, BiasBlocks, DenseBlocks, DistanceBlocks
from fat5.ops.attention.blockwise import Dropout, Sequences, attend, attend_backward

_NO_TENSOR = 0  # elements of the placeholder that stands for a gradient nobody asked for


class Problem(NamedTuple):
    """What the ops take besides tensors with a gradient; the fields are those of `blockwise_attention`."""

    offset: int | None
    offsets: Tensor | None
    key_starts: Tensor | None
    key_lengths: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    softmax_scale: float
    causal: bool
    dropout_p: float
    seed: Tensor | None

    @property
    def dropout(self) -> Dropout | None:
        """The dropout with its seed read from the device."""
        return Dropout(self.dropout_p, int(self.seed)) if self.dropout_p > 0 and self.seed is not None else None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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
    dtype, dropout = accumulation_dtype(q.dtype), problem.dropout
    q_bounds = _boundaries("cu_seqlens_q", problem.cu_seqlens_q, q.shape[0])
    k_bounds = _boundaries("cu_seqlens_k", problem.cu_seqlens_k, k.shape[0])
    offsets = [problem.offset] * (len(q_bounds) - 1) if problem.offsets is None else problem.offsets.tolist()
    for n, offset in enumerate(offsets):
        where_q, where_k = slice(*q_bounds[n : n + 2]), slice(*k_bounds[n : n + 2])
        num_queries, num_keys = where_q.stop - where_q.start, where_k.stop - where_k.start
        if num_queries == 0 or num_keys == 0:
            continue
        local = (x[w].to(dtype).transpose(0, 1)[None] for x, w in ((q, where_q), (k, where_k), (v, where_k)))
        ids = (torch.arange(w.start, w.stop, device=q.device)[None] if dropout else None for w in (where_q, where_k))
        offset = num_keys - num_queries if offset is None else offset
        scores = (problem.causal, problem.softmax_scale, bias)
        yield _Group((where_q,), (where_k,), Sequences(*local, offset, *scores, None, None, dropout, *ids))


def _padded(q: Tensor, k: Tensor, v: Tensor, bias: BiasBlocks, problem: Problem) -> Iterator[_Group]:
    """Yield the whole padded batch, or its rows one by one where each has an offset of its own."""
    batch, num_queries, num_keys = q.shape[0], q.shape[1], k.shape[1]
    dtype, device, dropout = accumulation_dtype(q.dtype), q.device, problem.dropout
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
        local = (x[rows].to(dtype).transpose(1, 2) for x in (q, k, v))
        ids: tuple[Tensor | None, Tensor | None] = (None, None)
        if dropout:
            row = torch.arange(batch, device=device)[rows, None]
            ids = (
                row * num_queries + torch.arange(num_queries, device=device),
                row * num_keys + torch.arange(num_keys, device=device),
            )
        bounds = (None, None) if starts is None or ends is None else (starts[rows], ends[rows])
        scores = (problem.causal, problem.softmax_scale, bias.rows_of_batch(rows))
        yield _Group((rows,), (rows,), Sequences(*local, offset, *scores, *bounds, dropout, *ids))


def _lse_view(lse: Tensor, where: tuple[slice, ...], packed: bool) -> Tensor:
    return lse[:, where[0]][None] if packed else lse[where]


@torch.library.custom_op("fat5::blockwise_attention", mutates_args=())
def blockwise_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    bias_kind: str,
    offset: int | None,
    offsets: Tensor | None,
    key_starts: Tensor | None,
    key_lengths: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    softmax_scale: float,
    causal: bool,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention in blocks; `fat5.ops.flash_attention` checks the arguments and says what they mean.

    Returns:
        The output, shaped and typed as q, and the log-sum-exp [B, H, Lq] or [H, total] in the accumulation type.
    """
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    packed = cu_seqlens_q is not None
    lse_shape = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.full(lse_shape, torch.inf, dtype=accumulation_dtype(q.dtype), device=q.device)
    blocks = _bias_blocks(bias, bias_kind, lse.dtype, None)
    problem = Problem(
        offset, offsets, key_starts, key_lengths, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, dropout_p, seed
    )  # fmt: skip
    for where, _, seqs in _sequences(q, k, v, blocks, problem):
        local_out, local_lse = attend(seqs)
        out[where] = local_out.transpose(1, 2).reshape(out[where].shape).to(q.dtype)
        _lse_view(lse, where, packed).copy_(local_lse)
    return out, lse


@blockwise_attention.register_fake
def _(q, k, v, bias, bias_kind, offset, offsets, key_starts, key_lengths, cu_seqlens_q, *rest):
    packed = cu_seqlens_q is not None
    lse_shape = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty(q.shape), q.new_empty(lse_shape, dtype=accumulation_dtype(q.dtype))


@torch.library.custom_op("fat5::blockwise_attention_backward", mutates_args=())
def blockwise_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    bias_kind: str,
    offset: int | None,
    offsets: Tensor | None,
    key_starts: Tensor | None,
    key_lengths: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    softmax_scale: float,
    causal: bool,
    dropout_p: float,
    seed: Tensor | None,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the bias; the last is empty unless `bias_grad`."""
    grad_q, grad_k, grad_v = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dtype = lse.dtype
    grad_bias = None
    if bias is not None and bias_grad:
        grad_bias = torch.zeros(bias.shape, dtype=dtype, device=q.device)
    packed = cu_seqlens_q is not None
    blocks = _bias_blocks(bias, bias_kind, dtype, grad_bias)
    problem = Problem(
        offset, offsets, key_starts, key_lengths, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, dropout_p, seed
    )  # fmt: skip
    for where, where_k, seqs in _sequences(q, k, v, blocks, problem):
        local = (x[where].to(dtype) for x in (out, grad_out))
        local_out, local_grad = (x[None] if packed else x for x in local)
        grads = attend_backward(
            seqs, local_out.transpose(1, 2), _lse_view(lse, where, packed), local_grad.transpose(1, 2)
        )
        for total, place, grad in zip((grad_q, grad_k, grad_v), (where, where_k, where_k), grads, strict=True):
            total[place] = grad.transpose(1, 2).reshape(total[place].shape).to(total.dtype)
    if grad_bias is None:
        return grad_q, grad_k, grad_v, q.new_zeros(_NO_TENSOR)
    return grad_q, grad_k, grad_v, grad_bias.to(bias.dtype)  # type: ignore[union-attr]


@blockwise_attention_backward.register_fake
def _(grad_out, q, k, v, out, lse, bias, *rest):
    bias_grad = rest[-1]
    grad_bias = bias.new_empty(bias.shape) if bias is not None and bias_grad else q.new_empty(_NO_TENSOR)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), grad_bias


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, bias, kind, offset, offsets, starts, lengths, cu_q, cu_k, scale, causal, dropout_p, seed = inputs
    ctx.save_for_backward(q, k, v, *output, bias, offsets, starts, lengths, cu_q, cu_k, seed)
    ctx.settings = (kind, offset, scale, causal, dropout_p)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_lse):
    q, k, v, out, lse, bias, offsets, starts, lengths, cu_q, cu_k, seed = ctx.saved_tensors
    kind, offset, scale, causal, dropout_p = ctx.settings
    if grad_out is None:
        return (None,) * 15
    needs_bias = bias is not None and ctx.needs_input_grad[3]
    grad_q, grad_k, grad_v, grad_bias = blockwise_attention_backward(
        grad_out, q, k, v, out, lse, bias, kind, offset, offsets, starts, lengths, cu_q, cu_k, scale, causal,
        dropout_p, seed, needs_bias,
    )  # fmt: skip
    return (grad_q, grad_k, grad_v, grad_bias if needs_bias else None, *(None,) * 11)


blockwise_attention.register_autograd(_backward, setup_context=_setup_context)
