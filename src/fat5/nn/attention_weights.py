"""The weights of an attention, for those who want to look at them; no kernel ever makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fat5.nn.attention import Attention


@torch.no_grad()
def attention_weights(attend: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor) -> Tensor:
    """Return the weights with which an attention adds up its values.

    Attention to values that are unit vectors returns the weights of as many keys as a value has channels. So this holds
    for whatever `attend` does with bias, masks, packing and types; it runs it `Lk / D` times.

    Args:
        attend: From queries, keys and values to outputs, shaped as the queries.
        q: [B, Lq, H, D], or packed [total_q, H, D].
        k: [B, Lk, H, D], or packed.

    Returns:
        [B, Lq, H, Lk], or packed [total_q, H, total_k].
    """
    num_keys, width = k.shape[-3], k.shape[-1]
    parts = []
    for first in range(0, num_keys, width):
        channels = torch.arange(min(width, num_keys - first), device=k.device)
        units = torch.zeros_like(k)
        units[..., first + channels, :, channels] = 1
        parts.append(attend(q, k, units)[..., : len(channels)])
    return torch.cat(parts, -1)


@contextmanager
def recorded_weights(attentions: Sequence[Attention]) -> Iterator[list[Tensor]]:
    """Have attentions make their weights too; the list holds one tensor for each after the block, in their order.

    Yields:
        A list, filled at the end with [B, H, Lq, Lk] of each attention, or packed [H, total_q, total_k].
    """
    found: list[Tensor] = []
    for attention in attentions:
        attention.weights = None
        attention.keeps_weights = True
    try:
        yield found
        found += [attention.weights for attention in attentions if attention.weights is not None]
    finally:
        for attention in attentions:
            attention.weights = None
            attention.keeps_weights = False
