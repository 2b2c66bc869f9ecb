"""T5's feed-forward layers, plain and gated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fat5.errors import nearest
from fat5.nn.dropout import Dropout
from fat5.nn.joined import is_plain, is_wrapped, joined_weight
from fat5.ops.activation import gated_gelu, joined_gated_gelu
from fat5.ops.feed_forward import gated_feed_forward

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
"""Activations by the names that T5 configurations use; `gelu_new` is the tanh approximation."""

GATED_GELUS = {"gelu": "none", "gelu_new": "tanh"}


class FeedForward(nn.Module):
    """`wo(act(wi(x)))`, or gated `wo(act(wi_0(x)) * wi_1(x))`, without biases.

    Args:
        d_model: Width of the model.
        d_ff: Inner width.
        activation: A name in `ACTIVATIONS`.
        gated: Multiply by a second projection (Shazeer, GLU variants improve Transformer, 2020).
        dropout: Probability of dropping an inner activation in training.
        backend: Backend of `fat5.ops.gated_gelu`, for a gated `gelu` or `gelu_new`.
        keep_inner: Keep what a gated GELU returns for the backward, `d_ff` values a token. By default the backward
            makes it again where the kernels run, which costs one more write of it.
    """

    wi: nn.Linear
    wi_0: nn.Linear
    wi_1: nn.Linear

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        activation: str,
        gated: bool,
        dropout: float = 0.0,
        backend: str = "auto",
        keep_inner: bool = False,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            hint = nearest(activation, ACTIVATIONS)
            raise ValueError(f"got activation={activation!r}; expected one of {sorted(ACTIVATIONS)}{hint}")
        self.activation = activation
        self.gated = gated
        self.backend = backend
        self.keep_inner = keep_inner
        if gated:
            self.wi_0 = nn.Linear(d_model, d_ff, bias=False)
            self.wi_1 = nn.Linear(d_model, d_ff, bias=False)
        else:
            self.wi = nn.Linear(d_model, d_ff, bias=False)
        self.wo = nn.Linear(d_ff, d_model, bias=False)
        self.dropout = Dropout(dropout)

    def forward(self, hidden_states: Tensor, joined: Tensor | None = None) -> Tensor:
        """Map [..., d_model] to [..., d_model].

        Args:
            hidden_states: The input.
            joined: Gated: the weights of wi_0 and wi_1 one below the other, to be multiplied by at once. Without them a
                gated GELU joins them itself, where `joined_weight` can.
        """
        if joined is None and self.gated and self.activation in GATED_GELUS:
            joined = joined_weight([self.wi_0, self.wi_1], hidden_states)
        if joined is not None and self.activation in GATED_GELUS:
            drops = (self.training and self.dropout.p > 0) or is_wrapped(self.dropout)
            if not drops and is_plain(self.wo) and _type_of_products(hidden_states) != torch.float16:
                return gated_feed_forward(
                    hidden_states,
                    joined,
                    self.wo.weight,
                    approximate=GATED_GELUS[self.activation],
                    keep_inner=self.keep_inner,
                    backend=self.backend,
                )
            inner = joined_gated_gelu(F.linear(hidden_states, joined), **self._gelu())
        else:
            inner = self._inner(hidden_states, joined)
        if inner.dtype == torch.float16:
            # An infinity would be NaN after wo; the residual stream bounds what wo makes of large finite ones.
            largest = torch.finfo(torch.float16).max
            inner = inner.clamp(-largest, largest)
        return self.wo(self.dropout(inner))

    def joined_maps(self) -> list[nn.Linear]:
        """Return the maps that one product may do for: those of a gated GELU."""
        return [self.wi_0, self.wi_1] if self.gated and self.activation in GATED_GELUS else []

    def _gelu(self) -> dict[str, str]:
        return {"approximate": GATED_GELUS[self.activation], "backend": self.backend}

    def _inner(self, hidden_states: Tensor, joined: Tensor | None) -> Tensor:
        if not self.gated:
            return ACTIVATIONS[self.activation](self.wi(hidden_states))
        if joined is None:
            gate, up = self.wi_0(hidden_states), self.wi_1(hidden_states)
        else:
            gate, up = F.linear(hidden_states, joined).chunk(2, -1)
        if self.activation in GATED_GELUS:
            return gated_gelu(gate, up, **self._gelu())
        return ACTIVATIONS[self.activation](gate) * up


def _type_of_products(states: Tensor) -> torch.dtype:
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
