"""The bias that self-attention adds to its scores: the module that makes it, and what each layer makes of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fat5.nn.layout import SequenceLayout, additive_mask
from fat5.nn.position.alibi import AlibiSlopes, heads_looking_back
from fat5.nn.position.fire import FireBias
from fat5.nn.position.relative import RelativePositionBias
from fat5.nn.position.settings import PositionSettings
from fat5.nn.position.stack import StackPositions
from fat5.ops import AlibiBias, DenseBias, DistanceBias

BIAS_NAMES = {"relative": "relative_attention_bias", "alibi": "alibi", "fire": "fire"}
"""Name of the module that makes a stack's bias, within the attention that owns it; `relative` has T5's."""


def bias_module(settings: PositionSettings, num_heads: int, *, causal: bool) -> nn.Module | None:
    """Return the module that makes a stack's bias, for its first self-attention to own; None without a bias."""
    if settings.position_encoding == "relative":
        return RelativePositionBias(
            settings.relative_attention_num_buckets,
            num_heads,
            bidirectional=not causal,
            max_distance=settings.relative_attention_max_distance,
        )
    if settings.position_encoding == "alibi":
        return AlibiSlopes(
            num_heads, learned=settings.alibi_learned_slopes, symmetric=settings.alibi_symmetric or causal
        )
    if settings.position_encoding == "fire":
        return FireBias(num_heads, width=settings.fire_width, threshold=settings.fire_threshold)
    return None


def shared_bias(
    settings: PositionSettings,
    module: nn.Module,
    positions: StackPositions,
    layout: SequenceLayout,
    device: torch.device,
    *,
    causal: bool,
) -> Tensor:
    """Return the tensor that the layers of a stack share, in float32 at least.

    It is T5's bias by distance [num_heads, 2R + 1] or ALiBi's slopes [num_heads], linear in memory; where the positions
    are given, for each pair of them the bias [1 or B, num_heads, Lq, Lk], with the holes of a mask hidden.

    Args:
        settings: The stack's position encoding.
        module: What `bias_module` returned.
        positions: Those of the stack.
        layout: Layout of the batch.
        device: Where the batch is.
        causal: True in a decoder.
    """
    if isinstance(module, FireBias):
        bias = module(positions.query_ids, positions.ids)
    else:
        values = module.by_distance().table if isinstance(module, RelativePositionBias) else module(device)
        if positions.ids is None or positions.query_ids is None:
            return values
        bias = _of_each_pair(settings, values, positions.query_ids, positions.ids, causal)
    return bias if layout.mask is None else bias + additive_mask(layout.mask, bias.dtype)


def attention_bias(
    settings: PositionSettings, shared: Tensor | None, layout: SequenceLayout
) -> DistanceBias | AlibiBias | DenseBias | None:
    """Return a self-attention's bias.

    Args:
        settings: The stack's position encoding.
        shared: What `shared_bias` returned; None without a bias.
        layout: Layout of the batch.
    """
    if shared is None:
        return hide_holes(layout)
    if shared.ndim == 4:
        return DenseBias(shared)
    return AlibiBias(shared) if settings.position_encoding == "alibi" else DistanceBias(shared)


def hide_holes(layout: SequenceLayout) -> DenseBias | None:
    """Return the bias that hides what a mask with holes does not call real, or None without such a mask."""
    if layout.mask is None:
        return None
    return DenseBias(additive_mask(layout.mask, torch.float32) if layout.hidden is None else layout.hidden)


def _of_each_pair(
    settings: PositionSettings, values: Tensor, query_ids: Tensor, key_ids: Tensor, causal: bool
) -> Tensor:
    """Return the bias of queries and keys at these positions [1 or B, L], as [1 or B, num_heads, Lq, Lk]."""
    distance = key_ids[:, None, :] - query_ids[:, :, None]  # [1 or B, Lq, Lk]
    if settings.position_encoding == "relative":
        radius = values.shape[1] // 2
        return values[:, distance.clamp(-radius, radius) + radius].transpose(0, 1)
    bias = -values.view(-1, 1, 1) * distance.abs()[:, None]
    if settings.is_one_sided(causal=causal):
        looks_ahead = torch.arange(values.shape[0], device=values.device) >= heads_looking_back(values.shape[0])
        hidden = torch.where(looks_ahead[:, None, None], (distance < 0)[:, None], (distance > 0)[:, None])
        bias = bias.masked_fill(hidden, -torch.inf)
    return bias
