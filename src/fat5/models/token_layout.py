"""Shape and layout of a model's tokens, from the forms in which they may come."""

from __future__ import annotations

import torch
from torch import Tensor

from fat5.nn import SequenceLayout


def token_shape(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> torch.Size:
    """Return the shape of the tokens, [B, L] or packed [total], whichever way they come."""
    if input_ids is not None and inputs_embeds is None:
        return input_ids.shape
    if inputs_embeds is not None and input_ids is None:
        return inputs_embeds.shape[:-1]
    raise ValueError(
        "expected exactly one of input_ids and inputs_embeds; got " + ("both" if input_ids is not None else "neither")
    )


def make_layout(
    shape: torch.Size, attention_mask: Tensor | None, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> SequenceLayout:
    """Return the layout of tokens of this shape that a mask or the offsets of packed documents describe."""
    if (cu_seqlens is None) != (max_seqlen is None):
        raise ValueError(
            f"got max_seqlen={max_seqlen} with{'out' if cu_seqlens is None else ''} cu_seqlens; they belong together"
        )
    if len(shape) != (2 if cu_seqlens is None else 1):
        raise ValueError(
            f"got inputs of shape {list(shape)}; expected [batch, length] without cu_seqlens, [total] with them"
        )
    if cu_seqlens is not None and max_seqlen is not None:
        if attention_mask is not None:
            raise ValueError("got an attention_mask with cu_seqlens; packed inputs take no mask")
        return SequenceLayout.packed(cu_seqlens, max_seqlen)
    if attention_mask is not None and attention_mask.shape != shape:
        raise ValueError(
            f"got attention_mask {list(attention_mask.shape)} for inputs {list(shape)}; expected one entry a token"
        )
    return SequenceLayout.from_attention_mask(attention_mask)
