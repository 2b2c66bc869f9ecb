"""One attention as the backends see it: checked tensors and settings."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


Gradients = tuple[Tensor, Tensor, Tensor]
"""Those of q, k and v; as memory to write to, those of k and v have equal strides."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """The arguments of `fat5.ops.flash_attention`, as the custom ops take them.

    Args:
        q: [B, Lq, H, D], or packed [total_q, H, D].
        k: [B, Lk, H, D], or packed.
        v: Shaped as k.
        bias: None, or the tensor that the kind of bias stands for.
        bias_kind: "none", "distance" (table [H, 2R + 1]), "alibi" or "alibi-signed" (slopes [H]), "dense".
        offset: Query offset of all sequences; None for keys minus queries of each packed document.
        offsets: Query offset of each sequence, instead.
        key_starts: First real key of each row.
        key_lengths: Real keys of each row.
        cu_seqlens_q: Offsets of the packed documents in q.
        cu_seqlens_k: Offsets in k.
        softmax_scale: Factor of the scores.
        causal: Hide later keys.
        dropout_p: Probability of dropping a weight.
        seed: Integer scalar tensor, where dropout_p > 0.
        plan: What the backend made of lengths and bias for all calls with the same, see `plan.py`; no result depends on
            it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    bias_kind: str
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
    plan: Tensor | None = None

    @functools.cached_property
    def signature(self) -> Hashable:
        """What a launch's scalars and constants depend on: sizes, strides, settings, and which tensors there are."""
        q, k, v, bias, documents = self.q, self.k, self.v, self.bias, self.cu_seqlens_q
        return (
            q.shape, q.stride(), k.shape, k.stride(), v.stride(), q.dtype, q.device, self.bias_kind,
            None if bias is None else (bias.shape, bias.stride()), self.offset, self.offsets is None,
            self.key_starts is None, self.key_lengths is None, None if documents is None else documents.shape,
            self.softmax_scale, self.causal, self.dropout_p,
        )  # fmt: skip

    @property
    def packed(self) -> bool:
        """True for documents side by side."""
        return self.cu_seqlens_q is not None

    @property
    def batch(self) -> int:
        """Rows of a padded batch, 1 when packed."""
        return 1 if self.packed else self.q.shape[0]

    @property
    def num_queries(self) -> int:
        """Queries of a row, or of the packed batch."""
        return self.q.shape[-3]

    @property
    def num_keys(self) -> int:
        """Keys of a row, or of the packed batch."""
        return self.k.shape[-3]

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.q.shape[-2]

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.q.shape[-1]

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """[B, H, Lq], or packed [H, total_q]."""
        return (self.heads, self.num_queries) if self.packed else (self.batch, self.heads, self.num_queries)

    def room_for_gradients(self) -> Gradients:
        """Return memory for the gradients of q, k and v, contiguous, that nobody has written."""
        q, k, v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (self.q, self.k, self.v))
        return q, k, v
