"""Keys and values of cross-attention in all layers of a decoder, from one matrix product of the encoder's states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fat5.nn.joined import joined_weights
from fat5.ops.attention.shared import shared_attention

if TYPE_CHECKING:
    from fat5.nn.attention import Attention


@dataclass(frozen=True)
class SharedKeys:
    """Keys and values of all layers, and how far the layers have come.

    Attributes:
        states: What they were made from.
        joined: [..., L, layers, 2, H, D], without a gradient, which goes back by the link.
        link: What the last layer that used them left for the next one, see `shared_attention`.
        first: The layer behind that one.
        autocast: Autocast's type where they were made, None where it was off.
    """

    states: Tensor
    joined: Tensor
    link: Tensor
    first: int = 0
    autocast: torch.dtype | None = None

    @classmethod
    def make(cls, attentions: Sequence[Attention], states: Tensor) -> SharedKeys | None:
        """Return keys and values of these layers, or None where each is to make its own.

        That is without gradients, since all of them would be in memory at once, which only a backward asks for; where
        the weights cannot be joined, or some are frozen and others not; and where the states lie on another device.
        """
        if not torch.is_grad_enabled() or len(attentions) < 2:
            return None
        if len({(attention.num_heads, attention.head_dim) for attention in attentions}) > 1:
            return None
        (weight,) = joined_weights([[linear for attention in attentions for linear in (attention.k, attention.v)]])
        if weight is None or weight.device != states.device or not (weight.requires_grad or states.requires_grad):
            return None
        heads = (attentions[0].num_heads, attentions[0].head_dim)
        joined = F.linear(states, weight).unflatten(-1, (len(attentions), 2, *heads))
        return cls(states, joined.detach(), joined, autocast=_autocast_type(states))

    def of_layer(self, layer: int) -> LayerKeys:
        """Return them as the cross-attention of a layer takes them."""
        return LayerKeys(self, layer)


class LayerKeys:
    """Shared keys and values for one call of one layer.

    Attributes:
        after: What the layers behind this one are to take: with another link, if the layer used them.
    """

    def __init__(self, shared: SharedKeys, layer: int) -> None:
        self.after = shared
        self._layer = layer

    def made_from(self, states: Tensor | None) -> bool:
        """Whether these states, under this autocast, are what they were made from: a hook may have changed both."""
        return states is not None and self.after.states is states and self.after.autocast == _autocast_type(states)

    def joined(self) -> Tensor:
        """Return k and v of the layer, [..., L, 2, H, D]."""
        return self.after.joined.select(-4, self._layer)

    def attend(self, q: Tensor, **options: Any) -> Tensor:
        """Return the attention of queries to them, with the options of `flash_attention`."""
        shared, layer = self.after, self._layer
        out, link = shared_attention(shared.joined, shared.link, q, layer=layer, first=shared.first, **options)
        if torch.is_grad_enabled():  # by a link without a gradient none would come back to the layers before
            self.after = replace(shared, link=link, first=layer + 1)
        return out


def _autocast_type(states: Tensor) -> torch.dtype | None:
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
