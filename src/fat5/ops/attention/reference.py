"""Attention as the formula says, for the tests: every score in memory, in the type of the inputs (use float64)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fat5.ops.attention.bias import AlibiBias, AttentionBias, DenseBias, DistanceBias, RelativeBias


def _bias_values(bias: AttentionBias, distance: Tensor) -> Tensor:
    if isinstance(bias, DenseBias):
        return bias.tensor
    if isinstance(bias, RelativeBias):
        bias = bias.by_distance()
    if isinstance(bias, DistanceBias):
        radius = bias.table.shape[1] // 2
        return bias.table[:, distance.clamp(-radius, radius) + radius].transpose(0, 1)
    if isinstance(bias, AlibiBias):
        signed = -distance.abs() if bias.symmetric else distance
        return bias.slopes.view(-1, 1, 1) * signed[:, None]
    raise TypeError(f"unknown bias {type(bias).__name__}")


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: AttentionBias | None = None,
    causal: bool = False,
    softmax_scale: float = 1.0,
    query_offset: int | Tensor | None = None,
    key_starts: Tensor | None = None,
    key_lengths: Tensor | None = None,
) -> Tensor:
    """Attention over padded batches, as in `fat5.ops.flash_attention`, without blocks.

    Args:
        q: [B, Lq, H, D].
        k: [B, Lk, H, D].
        v: [B, Lk, H, D].
        bias: see `fat5.ops.flash_attention`, as all that follows.
        causal: see there.
        softmax_scale: see there.
        query_offset: see there.
        key_starts: see there.
        key_lengths: see there.

    Returns:
        [B, Lq, H, D]; rows without a visible key are 0.
    """
    batch, num_queries, num_keys = q.shape[0], q.shape[1], k.shape[1]
    offset = num_keys - num_queries if query_offset is None else query_offset
    offset = torch.as_tensor(offset, device=q.device).expand(batch)
    keys = torch.arange(num_keys, device=q.device)
    queries = torch.arange(num_queries, device=q.device) + offset[:, None]
    distance = keys[None, None] - queries[:, :, None]  # [B, Lq, Lk]
    visible = distance <= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    starts = torch.zeros_like(offset) if key_starts is None else key_starts
    ends = torch.full_like(offset, num_keys) if key_lengths is None else starts + key_lengths
    real = (keys >= starts[:, None]) & (keys < ends[:, None])  # [B, Lk]
    k = torch.where(real[:, :, None, None], k, 0)
    v = torch.where(real[:, :, None, None], v, 0)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * softmax_scale
    if bias is not None:
        scores = scores + _bias_values(bias, distance).to(scores.dtype)
    scores = scores.masked_fill(~(visible & real[:, None])[:, None], -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def packed_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **kwargs: Any
) -> Tensor:
    """`attention_reference` of each document alone, in the packed layout [total, H, D]; unused rows are 0."""
    out = torch.zeros_like(q)
    queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for q0, q1, k0, k1 in zip(queries, queries[1:], keys, keys[1:], strict=False):
        if q1 > q0 and k1 > k0:
            out[q0:q1] = attention_reference(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], **kwargs)[0]
    return out
