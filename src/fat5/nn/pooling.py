"""One vector for each sequence of a batch, padded or packed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fat5.errors import nearest
from fat5.nn.layout import SequenceLayout
from fat5.nn.position.tokens import packed_tokens

POOLINGS = ("mean", "first", "eos")
"""What a sequence's vector may be; see `pool`."""


def pool(
    hidden_states: Tensor,
    layout: SequenceLayout,
    pooling: str,
    input_ids: Tensor | None = None,
    eos_token_ids: Sequence[int] = (),
) -> Tensor:
    """Return a vector for each sequence.

    * `mean`: the mean of its real tokens, summed in float32.
    * `first`: its first real token.
    * `eos`: its last real token that is an EOS; its last real token where none is, or where the ids are not known.

    Args:
        hidden_states: [B, L, d_model], or packed [total, d_model].
        layout: Layout of the batch.
        pooling: A name in `POOLINGS`.
        input_ids: eos: [B, L], or packed [total].
        eos_token_ids: eos: the ids that count as EOS.

    Returns:
        [B, d_model], or packed [documents, d_model]; 0 for a sequence without real tokens.

    Raises:
        ValueError: there is no such pooling.
    """
    if pooling not in POOLINGS:
        raise ValueError(f"got pooling={pooling!r}; expected one of {list(POOLINGS)}{nearest(str(pooling), POOLINGS)}")
    ends_text = None
    if pooling == "eos" and input_ids is not None:
        ends_text = torch.zeros_like(input_ids, dtype=torch.bool)
        for token in eos_token_ids:
            ends_text |= input_ids == token
    if layout.cu_seqlens is not None:
        return _pool_packed(hidden_states, layout.cu_seqlens, pooling, ends_text)
    return _pool_padded(hidden_states, layout, pooling, ends_text)


def _pool_padded(hidden_states: Tensor, layout: SequenceLayout, pooling: str, ends_text: Tensor | None) -> Tensor:
    batch, length = hidden_states.shape[:2]
    real = real_tokens(layout, batch, length, hidden_states.device)
    count = real.sum(1, keepdim=True)
    if pooling == "mean":
        total = (hidden_states * real[..., None]).sum(1, dtype=_wide(hidden_states))
        return (total / count.clamp_min(1)).to(hidden_states.dtype)
    slots = torch.arange(length, device=hidden_states.device)
    if pooling == "first":
        chosen = torch.where(real, slots, length - 1).amin(1)
    else:
        chosen = torch.where(real, slots, 0).amax(1)
        if ends_text is not None:
            last_end = torch.where(real & ends_text, slots, -1).amax(1)
            chosen = torch.where(last_end >= 0, last_end, chosen)
    picked = hidden_states[torch.arange(batch, device=hidden_states.device), chosen]
    return torch.where(count > 0, picked, 0)


def _pool_packed(hidden_states: Tensor, cu_seqlens: Tensor, pooling: str, ends_text: Tensor | None) -> Tensor:
    total, documents = hidden_states.shape[0], cu_seqlens.shape[0] - 1
    count = cu_seqlens.diff()[:, None]
    if pooling == "mean":
        # A product with a matrix of zeros and ones: deterministic where scattered sums on a GPU are not, and its
        # terms are added in float32.
        own = packed_tokens(cu_seqlens, total).document == torch.arange(documents, device=cu_seqlens.device)[:, None]
        # Rows behind the last document may hold anything; 0 times that need not be 0.
        rows = torch.arange(total, device=cu_seqlens.device)
        known = hidden_states.masked_fill((rows >= cu_seqlens[-1])[:, None], 0)
        return (own.to(known.dtype) @ known / count.clamp_min(1)).to(known.dtype)
    if pooling == "first":
        chosen = cu_seqlens[:-1]
    else:
        chosen = cu_seqlens[1:] - 1
        if ends_text is not None:
            rows = torch.arange(total, device=cu_seqlens.device)
            last_end = torch.where(ends_text, rows, -1).cummax(0).values[chosen.clamp_min(0)]
            chosen = torch.where(last_end >= cu_seqlens[:-1], last_end, chosen)
    return torch.where(count > 0, hidden_states[chosen.clamp(0, max(total - 1, 0))], 0)


def real_tokens(layout: SequenceLayout, batch: int, length: int, device: torch.device) -> Tensor:
    """Return which tokens of padded rows are real, bool [B, L]."""
    if layout.mask is not None:
        return layout.mask
    slots = torch.arange(length, device=device)
    if layout.starts is None or layout.lengths is None:
        return torch.ones(batch, length, dtype=torch.bool, device=device)
    return (slots >= layout.starts[:, None]) & (slots < (layout.starts + layout.lengths)[:, None])


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
