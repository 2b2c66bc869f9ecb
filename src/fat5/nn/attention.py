"""T5's multi-head attention as a module, for self- and cross-attention, padded and packed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fat5.nn.layout import SequenceLayout
from fat5.nn.position import RelativePositionBias
from fat5.ops import DenseBias, DistanceBias, flash_attention


class Attention(nn.Module):
    """Multi-head attention without biases in its projections: `o(softmax(q k^T + bias) v)`, scale 1.

    Args:
        d_model: Width of the model.
        num_heads: Heads.
        head_dim: Width of a head; the inner width is `num_heads * head_dim`.
        causal: Hide the keys that come after the query.
        dropout: Probability of dropping an attention weight in training.
        position_bias: T5's table where this layer owns one, else None.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int,
        *,
        causal: bool = False,
        dropout: float = 0.0,
        position_bias: RelativePositionBias | None = None,
    ) -> None:
        super().__init__()
        inner = num_heads * head_dim
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.causal = causal
        self.dropout = dropout
        self.q = nn.Linear(d_model, inner, bias=False)
        self.k = nn.Linear(d_model, inner, bias=False)
        self.v = nn.Linear(d_model, inner, bias=False)
        self.o = nn.Linear(inner, d_model, bias=False)
        if position_bias is not None:
            self.relative_attention_bias = position_bias

    def distance_table(self) -> Tensor | None:
        """Return this layer's own bias by distance, [num_heads, 2R + 1] in float32, or None if it owns no table."""
        own = getattr(self, "relative_attention_bias", None)
        return own.by_distance().table if own is not None else None

    def forward(
        self,
        hidden_states: Tensor,
        layout: SequenceLayout,
        distance_table: Tensor | None = None,
        key_value_states: Tensor | None = None,
        key_value_layout: SequenceLayout | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            hidden_states: [B, Lq, d_model], or packed [total_q, d_model].
            layout: Layout of the queries, and of the keys in self-attention.
            distance_table: Bias by distance [num_heads, 2R + 1], or None for no bias.
            key_value_states: Cross-attention: what keys and values are made from, [B, Lk, d_model] or packed.
            key_value_layout: Cross-attention: its layout.

        Returns:
            Shaped as hidden_states.
        """
        source = hidden_states if key_value_states is None else key_value_states
        key_layout = layout if key_value_layout is None else key_value_layout
        q = self.q(hidden_states).unflatten(-1, (self.num_heads, self.head_dim))  # [..., Lq, H, D]
        k = self.k(source).unflatten(-1, (self.num_heads, self.head_dim))
        v = self.v(source).unflatten(-1, (self.num_heads, self.head_dim))
        bias: DistanceBias | DenseBias | None = DistanceBias(distance_table) if distance_table is not None else None
        if key_layout.mask is not None:
            bias = _with_holes(bias, key_layout.mask, q.shape[1], k.shape[1])
        out = flash_attention(
            q,
            k,
            v,
            bias=bias,
            causal=self.causal,
            key_starts=key_layout.starts,
            key_lengths=key_layout.lengths,
            cu_seqlens_q=layout.cu_seqlens,
            cu_seqlens_k=key_layout.cu_seqlens,
            max_seqlen_q=layout.max_seqlen,
            max_seqlen_k=key_layout.max_seqlen,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.o(out.flatten(-2))


def _with_holes(bias: DistanceBias | None, mask: Tensor, num_queries: int, num_keys: int) -> DenseBias:
    """Materialise the bias [1, H, Lq, Lk] with the padding [B, 1, 1, Lk] hidden; distances are those of the slots."""
    dtype = bias.table.dtype if bias is not None else torch.float32
    hidden = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    hidden = hidden[:, None, None]
    return DenseBias(hidden if bias is None else bias.dense(num_queries, num_keys, num_keys - num_queries) + hidden)
