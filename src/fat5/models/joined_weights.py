"""Weights of a decoder that are multiplied with the same input, one below the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from fat5.models.modeling import FAT5ForConditionalGeneration


class JoinedWeights:
    """Copies of q, k and v, and of wi_0 and wi_1, of each of the decoder's layers, to take a step in fewer kernels.

    The parameters stay apart: they are initialised and trained apart. A layer that is not PyTorch's own linear one,
    such as an adapter's, is not joined.

    Args:
        model: The model.

    Attributes:
        attention: [3 * inner, d_model] of each layer, or None.
        feed_forward: [2 * d_ff, d_model] of each layer, or None where it is not gated.
    """

    def __init__(self, model: FAT5ForConditionalGeneration) -> None:
        self._sources: list[tuple[list[nn.Linear], Tensor]] = []
        self.attention: list[Tensor | None] = []
        self.feed_forward: list[Tensor | None] = []
        for block in model.decoder.block:
            layers = cast(Any, block).layer
            attention, feed_forward = layers[0].SelfAttention, layers[-1].DenseReluDense
            self.attention.append(self._join([attention.q, attention.k, attention.v]))
            gated = feed_forward.gated
            self.feed_forward.append(self._join([feed_forward.wi_0, feed_forward.wi_1]) if gated else None)

    def _join(self, linears: list[nn.Linear]) -> Tensor | None:
        if not all(_is_plain(linear) for linear in linears):
            return None
        weights = [linear.weight.detach() for linear in linears]
        if len({(weight.dtype, weight.device) for weight in weights}) > 1:
            return None
        joined = torch.cat(weights)
        self._sources.append((linears, joined))
        return joined

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights again: they may have been trained."""
        for linears, joined in self._sources:
            torch.cat([linear.weight for linear in linears], out=joined)


def _is_plain(linear: nn.Module) -> bool:
    # Wrappers of a module's method, as for offloading, replace it in the instance.
    hooked = linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear)
    return type(linear) is nn.Linear and linear.bias is None and not hooked
