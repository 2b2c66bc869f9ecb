"""Transformers' attention interface on `flash_attention`: what a T5 given to `fat5.patch` runs instead of its own.

Transformers looks the attention function of a model up by name, and a mask function under the same name, which it calls
once for each mask of a stack. The names, the cache and the projections stay Transformers' business, so that a release
that changes those changes nothing here. Three things pass from function to function through Transformers' own code:

- the mask: None where all keys are real, or a tensor that the type tells apart from a user's own 4-d mask (boolean or
  floating), which Transformers hands on as it is: `WINDOW` or `REAL_KEYS`, below;
- the bias: T5's bias by distance [heads, 2R + 1] where Transformers expects [1, heads, Lq, Lk]. Transformers hands it
  from the first block to the others, through checkpointed blocks too, because it is a tensor;
- the position of the first query: the number of keys minus that of queries, but for caches longer than what they hold.
  With those the bias is a pair, with the position.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import (
    AttentionMaskInterface,
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)

from fat5.nn import SequenceLayout
from fat5.ops import DenseBias, DistanceBias, RelativeBias, flash_attention

NAME = "fat5"

WINDOW = torch.int32
"""Type of a mask [B, 1, 2, Lk], expanded over the keys: each row's first real key and number of real keys."""

REAL_KEYS = torch.uint8
"""Type of a mask [B, 1, 1, Lk], where real keys have gaps between them: 1 where real."""


class KernelAttention(nn.Module):
    """What Transformers' T5, mT5 and UMT5 attention modules are given: the bias by distance, none in cross-attention.

    The attributes are those of Transformers' modules, the same in all three families.
    """

    config: Any
    is_decoder: bool
    has_relative_attention_bias: bool
    relative_attention_bias: nn.Embedding
    relative_attention_num_buckets: int
    relative_attention_max_distance: int

    def compute_bias(
        self, query_length: int, key_length: int, device: Any = None, past_seen_tokens: int | Tensor = 0
    ) -> Tensor | tuple[Tensor, int | Tensor] | None:
        """Return the bias by distance, with the position of the first query if that is not the usual one."""
        if not hasattr(self, "relative_attention_bias"):
            return None
        if self.config._attn_implementation != NAME:  # the user has since chosen another one
            return super().compute_bias(query_length, key_length, device, past_seen_tokens)  # type: ignore[misc]
        buckets = torch.arange(self.relative_attention_num_buckets, device=device)
        # Through the module, whose hooks may have to fetch the weight first (offloading, ZeRO).
        bias = RelativeBias(
            self.relative_attention_bias(buckets),
            bidirectional=not self.is_decoder,
            max_distance=self.relative_attention_max_distance,
        )
        table = bias.by_distance().table
        if isinstance(past_seen_tokens, int) and past_seen_tokens + query_length == key_length:
            return table
        return table, past_seen_tokens


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Return what `attend` needs to know of a padding mask; the interface of Transformers' `AttentionMaskInterface`.

    Causality is no part of it: the attention modules know theirs.

    Args:
        batch_size: B.
        q_length: Queries of each row.
        kv_length: Keys of each row, Lk.
        q_offset: Position of the first query.
        kv_offset: Position of the first key.
        mask_function: Which keys a query sees, padding apart. Others than causal and bidirectional, which T5's models
            do not ask for, give a dense mask.
        attention_mask: Bool [B, Lk], True where real, or shorter: the rest is then not real.
        **kwargs: What else Transformers tells its mask functions.

    Returns:
        None, or a mask of type `WINDOW` or `REAL_KEYS`, or a boolean one [B, 1, Lq, Lk].
    """
    if mask_function not in (causal_mask_function, bidirectional_mask_function) or kv_offset != 0:
        return sdpa_mask(
            **kwargs
            | {
                "batch_size": batch_size,
                "q_length": q_length,
                "kv_length": kv_length,
                "q_offset": q_offset,
                "kv_offset": kv_offset,
                "mask_function": mask_function,
                "attention_mask": attention_mask,
                "allow_is_causal_skip": False,
                "allow_is_bidirectional_skip": False,
            }
        )
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2 or attention_mask.shape[0] != batch_size or attention_mask.shape[1] > kv_length:
        raise ValueError(
            f"got an attention mask {list(attention_mask.shape)}; expected [{batch_size}, {kv_length}], an entry a "
            f"token, or 4 dimensions"
        )
    layout = SequenceLayout.from_attention_mask(attention_mask)
    if layout.mask is not None:
        padded = F.pad(layout.mask, (0, kv_length - attention_mask.shape[1]))
        return padded.to(REAL_KEYS)[:, None, None]
    if layout.starts is None or layout.lengths is None:
        return None
    window = torch.stack([layout.starts, layout.lengths]).to(WINDOW)  # [2, B]
    return window.T[:, None, :, None].expand(-1, -1, -1, kv_length)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    position_bias: Tensor | tuple[Tensor, int | Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend; the interface of Transformers' `AttentionInterface`.

    Args:
        module: Attention module, a `KernelAttention`.
        query: [B, H, Lq, D].
        key: [B, H, Lk, D].
        value: [B, H, Lk, D].
        attention_mask: What `make_mask` returned, or a user's own 4-d mask: boolean, True where a query sees a key, or
            floating, added to the scores. Such a mask stands for causality, too.
        scaling: Factor of the scores, 1 in T5.
        dropout: Probability of dropping an attention weight.
        position_bias: What `KernelAttention.compute_bias` returned.
        **kwargs: What else the model was called with: `output_attentions` counts.

    Returns:
        [B, Lq, H, D], and the attention weights [B, H, Lq, Lk] if asked for, which takes the scores in full.
    """
    if not isinstance(module, KernelAttention):
        raise ValueError(
            f"got attn_implementation={NAME!r} in a {type(module).__name__}; it works in models given to fat5.patch: "
            "call fat5.patch(model), or choose another implementation"
        )
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is not None:
        _check_mask(attention_mask, keys)
    table, offset = position_bias if isinstance(position_bias, tuple) else (position_bias, keys - queries)
    # Transformers' `is_causal` is no guide: in 5.17 UMT5's decoder says False. Self-attention alone has a bias.
    causal = module.is_decoder and table is not None
    causal = causal and (attention_mask is None or attention_mask.dtype in (WINDOW, REAL_KEYS))
    if kwargs.get("output_attentions", module.config.output_attentions):
        added = _dense_bias(query, keys, table, offset, attention_mask)
        if causal:
            positions = torch.arange(queries, device=query.device)[:, None] + offset
            later = torch.arange(keys, device=query.device) > positions
            added = torch.where(later, -torch.inf, added)
        return _attend_in_full(query, key, value, added, scaling, dropout)

    bias: DistanceBias | DenseBias | None = None
    starts = lengths = None
    if attention_mask is None or attention_mask.dtype == WINDOW:
        bias = None if table is None else DistanceBias(table)
        if attention_mask is not None:
            starts, lengths = attention_mask[:, 0, 0, 0].contiguous(), attention_mask[:, 0, 1, 0].contiguous()
    else:
        bias = DenseBias(_dense_bias(query, keys, table, offset, attention_mask))
    out = flash_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        bias=bias,
        causal=causal,
        softmax_scale=scaling,
        query_offset=offset.expand(query.shape[0]).contiguous() if isinstance(offset, Tensor) else offset,
        key_starts=starts,
        key_lengths=lengths,
        dropout_p=dropout,
    )
    return out, None


def _check_mask(mask: Any, keys: int) -> None:
    if not isinstance(mask, Tensor):
        raise ValueError(f"got an attention mask of type {type(mask).__name__}; expected a tensor of 2 or 4 dimensions")
    known = mask.dtype in (WINDOW, REAL_KEYS, torch.bool) or mask.is_floating_point()
    if not known or mask.ndim != 4 or mask.shape[-1] != keys:
        raise ValueError(
            f"got an attention mask {list(mask.shape)} of type {mask.dtype} for {keys} keys; expected a 2-d mask, "
            f"or a boolean or floating one [batch or 1, heads or 1, queries or 1, {keys}]"
        )


def _dense_bias(query: Tensor, keys: int, table: Tensor | None, offset: int | Tensor, mask: Tensor | None) -> Tensor:
    """Return bias and mask, but for causality, as one tensor [B or 1, H or 1, Lq or 1, Lk]; -inf hides a key."""
    bias = query.new_zeros(1, 1, 1, keys) if table is None else DistanceBias(table).dense(query.shape[2], keys, offset)
    if mask is None:
        return bias
    if mask.is_floating_point():
        return bias + mask
    if mask.dtype == WINDOW:
        after_start = torch.arange(keys, device=mask.device) - mask[:, :, :1, :1]  # [B, 1, 1, Lk]
        mask = (after_start >= 0) & (after_start < mask[:, :, 1:])
    return torch.where(mask.bool(), bias, -torch.inf)


def _attend_in_full(
    query: Tensor, key: Tensor, value: Tensor, added: Tensor, scaling: float, dropout: float
) -> tuple[Tensor, Tensor]:
    warnings.warn(
        "output_attentions=True: the kernels never make the attention weights, so they are computed in full here, in "
        "time and memory quadratic in the length",
        stacklevel=3,
    )
    scores = (query * scaling) @ key.transpose(2, 3) + added
    # A row that sees no key averages all of them, as in Transformers.
    weights = scores.clamp_min(torch.finfo(scores.dtype).min).softmax(-1).to(query.dtype)
    weights = F.dropout(weights, dropout)
    return (weights @ value).transpose(1, 2).contiguous(), weights


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, make_mask)
