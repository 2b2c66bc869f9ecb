"""T5's feed-forward layers, plain and gated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from fat5.errors import nearest

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
"""Activations by the names that T5 configurations use; `gelu_new` is the tanh approximation."""


class FeedForward(nn.Module):
    """`wo(act(wi(x)))`, or gated `wo(act(wi_0(x)) * wi_1(x))`, without biases.

    Args:
        d_model: Width of the model.
        d_ff: Inner width.
        activation: A name in `ACTIVATIONS`.
        gated: Multiply by a second projection (Shazeer, GLU variants improve Transformer, 2020).
        dropout: Probability of dropping an inner activation in training.
    """

    wi: nn.Linear
    wi_0: nn.Linear
    wi_1: nn.Linear

    def __init__(self, d_model: int, d_ff: int, *, activation: str, gated: bool, dropout: float = 0.0) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            hint = nearest(activation, ACTIVATIONS)
            raise ValueError(f"got activation={activation!r}; expected one of {sorted(ACTIVATIONS)}{hint}")
        self.activation = activation
        self.gated = gated
        if gated:
            self.wi_0 = nn.Linear(d_model, d_ff, bias=False)
            self.wi_1 = nn.Linear(d_model, d_ff, bias=False)
        else:
            self.wi = nn.Linear(d_model, d_ff, bias=False)
        self.wo = nn.Linear(d_ff, d_model, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map [..., d_model] to [..., d_model]."""
        act = ACTIVATIONS[self.activation]
        inner = act(self.wi_0(hidden_states)) * self.wi_1(hidden_states) if self.gated else act(self.wi(hidden_states))
        return self.wo(self.dropout(inner))
