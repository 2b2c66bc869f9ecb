"""T5's multi-head attention as a module, for self- and cross-attention, padded and packed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fat5.nn.attention_weights import attention_weights
from fat5.nn.joined import joined_weight
from fat5.nn.key_values import KeyValues
from fat5.nn.layout import SequenceLayout
from fat5.nn.plans import AttentionPlans
from fat5.nn.position import (
    BIAS_NAMES,
    PositionSettings,
    StackPositions,
    attention_bias,
    bias_module,
    hide_holes,
    one_sided_attention,
    shared_bias,
)
from fat5.nn.shared_keys import LayerKeys
from fat5.ops import AlibiBias, AttentionPlan, DenseBias, DistanceBias, flash_attention, joined_attention
from fat5.ops.attention.joined_ops import joined_parts

_SLOTS = StackPositions()


class Attention(nn.Module):
    """Multi-head attention without biases in its projections: `o(softmax(q k^T + bias) v)`, scale 1.

    Args:
        d_model: Width of the model.
        num_heads: Heads.
        head_dim: Width of a head; the inner width is `num_heads * head_dim`.
        causal: Hide the keys that come after the query.
        dropout: Probability of dropping an attention weight in training.
        position: Position encoding of self-attention; None, as in cross-attention, for none of any kind.
        owns_bias: This layer holds the parameters of the bias that the layers of its stack share.
        backend: Backend of `fat5.ops.flash_attention`.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int,
        *,
        causal: bool = False,
        dropout: float = 0.0,
        position: PositionSettings | None = None,
        owns_bias: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        inner = num_heads * head_dim
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.causal = causal
        self.dropout = dropout
        self.position = position
        self.backend = backend
        self.q = nn.Linear(d_model, inner, bias=False)
        self.k = nn.Linear(d_model, inner, bias=False)
        self.v = nn.Linear(d_model, inner, bias=False)
        self.o = nn.Linear(inner, d_model, bias=False)
        self.keeps_weights = False  # set by `recorded_weights`
        self.weights: Tensor | None = None
        self.bias_name: str | None = None
        module = bias_module(position, num_heads, causal=causal) if position is not None and owns_bias else None
        if position is not None and module is not None:
            self.bias_name = BIAS_NAMES[position.position_encoding]
            self.add_module(self.bias_name, module)

    def own_bias(self, positions: StackPositions, layout: SequenceLayout, device: torch.device) -> Tensor | None:
        """Return what the layers of this layer's stack share, see `shared_bias`, or None if this layer owns none."""
        if self.position is None or self.bias_name is None:
            return None
        module = getattr(self, self.bias_name)
        return shared_bias(self.position, module, positions, layout, device, causal=self.causal)

    def forward(
        self,
        hidden_states: Tensor,
        layout: SequenceLayout,
        position_bias: Tensor | None = None,
        positions: StackPositions = _SLOTS,
        key_value_states: Tensor | None = None,
        key_value_layout: SequenceLayout | None = None,
        cache: KeyValues | None = None,
        query_offset: int | Tensor | None = None,
        shared: LayerKeys | None = None,
        weight: Tensor | None = None,
        plans: AttentionPlans | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            hidden_states: [B, Lq, d_model], or packed [total_q, d_model].
            layout: Layout of the queries, and of the keys in self-attention, those in the cache included.
            position_bias: Self-attention: what `own_bias` of the stack's first layer returned, or None for no bias.
            positions: Self-attention: the stack's positions.
            key_value_states: Cross-attention: what keys and values are made from, [B, Lk, d_model] or packed.
            key_value_layout: Cross-attention: its layout.
            cache: Keys and values of earlier calls. Self-attention adds its own; cross-attention makes them once, and
                does not look at key_value_states after that.
            query_offset: Self-attention with a cache: position of the first query, an int or int tensor [B].
            shared: Cross-attention: the keys and values that key_value_states give, if they have been made for all
                layers at once.
            weight: Self-attention: the weights of `joined_maps` one below the other, if they have been joined.
            plans: Those of this forward pass, where the layers of a stack share them.

        Returns:
            Shaped as hidden_states.
        """
        key_layout = layout if key_value_layout is None else key_value_layout
        dropout_p = self.dropout if self.training else 0.0
        options: dict[str, Any] = {
            "causal": self.causal,
            "query_offset": query_offset,
            "key_starts": key_layout.starts,
            "key_lengths": key_layout.lengths,
            "cu_seqlens_q": layout.cu_seqlens,
            "cu_seqlens_k": key_layout.cu_seqlens,
            "max_seqlen_q": layout.max_seqlen,
            "max_seqlen_k": key_layout.max_seqlen,
            "backend": self.backend,
        }
        rotation, one_sided = None, False
        bias: DistanceBias | AlibiBias | DenseBias | None
        if self.position is None:
            bias = hide_holes(key_layout)
        else:
            bias = attention_bias(self.position, position_bias, layout)
            rotation, one_sided = positions.rotation, self.position.is_one_sided(causal=self.causal)
        attend: Callable[..., Tensor] = partial(flash_attention, bias=bias, **options)
        if one_sided and isinstance(bias, AlibiBias):
            attend = partial(one_sided_attention, slopes=bias.slopes, layout=layout, backend=self.backend)
        joined = None
        if cache is not None or (shared is not None and not shared.made_from(key_value_states)):
            shared = None
        if cache is None and shared is None and rotation is None and not one_sided:
            joined = self._joined(hidden_states, key_value_states, weight)
        if dropout_p > 0 or one_sided or isinstance(bias, DenseBias):
            plans = None

        def plan(q: Tensor, k: Tensor) -> AttentionPlan | None:
            return None if plans is None else plans.plan(q, k, bias=bias, **options)

        if shared is not None:
            q = self.q(hidden_states).unflatten(-1, (self.num_heads, self.head_dim))
            q, k, _ = joined_parts(shared.joined(), q)
            out = shared.attend(q, bias=bias, dropout_p=dropout_p, plan=plan(q, k), **options)
        elif joined is None:
            q, k, v = self._apart(hidden_states, key_value_states, cache)
            if rotation is not None:
                q, k = rotation(q, k)
            if self.position is not None and cache is not None:
                k, v = cache.append(k, v)
            if plans is not None:
                attend = partial(attend, plan=plan(q, k))
            out = attend(q, k, v, dropout_p=dropout_p)
        else:
            q, k, _ = joined_parts(*joined)
            out = joined_attention(*joined, bias=bias, dropout_p=dropout_p, plan=plan(q, k), **options)
        if self.keeps_weights:
            weights = attention_weights(attend, q, k)  # [..., Lq, H, Lk]
            self.weights = weights.reshape(*hidden_states.shape[:-1], *weights.shape[-2:]).transpose(-3, -2)
        return self.o(out.reshape(*hidden_states.shape[:-1], self.num_heads * self.head_dim))

    def joined_maps(self) -> list[nn.Linear]:
        """Return the maps of self-attention that one product may do for; none where q and k are turned, or split."""
        if self.position is None or self.position.position_encoding == "rotary":
            return []
        return [] if self.position.is_one_sided(causal=self.causal) else [self.q, self.k, self.v]

    def _joined(
        self, hidden_states: Tensor, key_value_states: Tensor | None, weight: Tensor | None
    ) -> tuple[Tensor, Tensor | None] | None:
        """Return q, k and v of one product and None; or k and v, and q; or None where the weights cannot be joined."""
        heads = (self.num_heads, self.head_dim)
        if key_value_states is None:
            if weight is None:
                weight = joined_weight([self.q, self.k, self.v], hidden_states)
            return None if weight is None else (F.linear(hidden_states, weight).unflatten(-1, (3, *heads)), None)
        weight = joined_weight([self.k, self.v], key_value_states)
        if weight is None:
            return None
        return F.linear(key_value_states, weight).unflatten(-1, (2, *heads)), self.q(hidden_states).unflatten(-1, heads)

    def _apart(
        self, hidden_states: Tensor, key_value_states: Tensor | None, cache: KeyValues | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, and k and v before any rotation; in cross-attention those of the cache, where it has them."""
        heads = (self.num_heads, self.head_dim)
        if key_value_states is None and cache is not None and cache.joined is not None:
            q, k, v = F.linear(hidden_states, cache.joined).unflatten(-1, (3, *heads)).unbind(-3)
            return q, k, v
        q = self.q(hidden_states).unflatten(-1, heads)  # [..., Lq, H, D]
        if key_value_states is None:
            return q, *self.keys_and_values(hidden_states)
        kept = None if cache is None else cache.stored()
        if kept is None:
            k, v = self.keys_and_values(key_value_states)
            k, v = (k, v) if cache is None else cache.append(k, v)
        else:
            k, v = kept
            if q.shape[0] != k.shape[0]:  # rows that share their keys are queries of one row
                q = q.reshape(k.shape[0], -1, *heads)
        return q, k, v

    def keys_and_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of these states [..., L, d_model], each [..., L, H, D], before any rotation."""
        heads = (self.num_heads, self.head_dim)
        return self.k(states).unflatten(-1, heads), self.v(states).unflatten(-1, heads)
