"""How the sequences of a batch lie in memory: padded rows, or documents packed side by side."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

_Moved = TypeVar("_Moved", bound="MovesToDevice")


class MovesToDevice:
    """A dataclass of tensors, and of such classes, with the `to` that accelerate calls on arguments.

    It calls it where a model is spread over several devices, before a block that lies on another one.
    """

    def to(self: _Moved, device: torch.device | str, non_blocking: bool = False) -> _Moved:
        """Return the same content on a device."""
        moved = {
            name: value.to(device, non_blocking=non_blocking)
            for name, value in vars(self).items()
            if isinstance(value, (Tensor, MovesToDevice))
        }
        return dataclasses.replace(self, **moved)  # type: ignore[type-var]


@dataclass(frozen=True)
class SequenceLayout(MovesToDevice):
    """One side of attention: where its sequences begin and end, and which of its tokens are real.

    Args:
        cu_seqlens: Packed: int tensor [documents + 1], offsets of the documents; None for padded rows.
        max_seqlen: Packed: the longest document, or an upper bound.
        starts: Padded: int tensor [B], first real token of each row; None where all are real.
        lengths: Padded: int tensor [B], real tokens of each row.
        mask: Padded rows whose padding is not at the ends alone: bool tensor [B, L], True where real. Attention then
            takes the dense path.
        hidden: The mask as attention adds it, float32 [B, 1, 1, L], 0 where real and -inf elsewhere, where it was made
            for many calls.
    """

    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None
    starts: Tensor | None = None
    lengths: Tensor | None = None
    mask: Tensor | None = None
    hidden: Tensor | None = None

    @classmethod
    def from_attention_mask(cls, attention_mask: Tensor | None) -> SequenceLayout:
        """Read a padding mask [B, L], non-zero where real: left, right or on both sides, or with holes.

        An eager call looks at the mask's values, which waits for a GPU once. A compiled call can't: it takes each
        row's real tokens to be contiguous and stops with an assertion on the device where they are not.
        """
        if attention_mask is None:
            return cls()
        mask = attention_mask.bool()
        positions = torch.arange(mask.shape[1], device=mask.device)
        lengths = mask.sum(1)
        starts = (~mask & (mask.cumsum(1) == 0)).sum(1)  # padding before the first real token
        starts = torch.where(lengths > 0, starts, 0)
        contiguous = (mask == ((positions >= starts[:, None]) & (positions < (starts + lengths)[:, None]))).all()
        if torch.compiler.is_compiling():
            torch._assert_async(
                contiguous, "a compiled model takes padding at the ends of a row alone; this attention_mask has holes"
            )
            return cls(starts=starts, lengths=lengths)
        all_contiguous, all_real = torch.stack([contiguous, mask.all()]).tolist()
        if all_real:
            return cls()
        return cls(starts=starts, lengths=lengths) if all_contiguous else cls(mask=mask)

    @classmethod
    def packed(cls, cu_seqlens: Tensor, max_seqlen: int) -> SequenceLayout:
        """Documents side by side."""
        return cls(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)

    def in_full(self, num_tokens: int) -> SequenceLayout:
        """Return padded rows of this length as a mask and its additive form, for many calls that each have few queries.

        What tokens that are not real hold must be finite then.
        """
        mask = self.mask
        if self.starts is not None and self.lengths is not None:
            places = torch.arange(num_tokens, device=self.starts.device) - self.starts[:, None]
            mask = (places >= 0) & (places < self.lengths[:, None])
        return self if mask is None else SequenceLayout(mask=mask, hidden=additive_mask(mask, torch.float32))

    @property
    def is_packed(self) -> bool:
        """True for documents side by side."""
        return self.cu_seqlens is not None


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where the mask [B, L] is True, else -inf, as [B, 1, 1, L]."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)[:, None, None]
