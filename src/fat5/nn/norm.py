"""T5's layer norm as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fat5.ops.norm import rms_norm


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, without mean or bias; see `fat5.ops.rms_norm`.

    Args:
        hidden_size: Size D of the last dimension.
        eps: Added to the mean square.
        device: Where the weight is made.
        dtype: Type of the weight; the output keeps the type of the input in any case.

    Shape:
        [..., D] to [..., D].
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the normalised states [..., D] in the type of the input."""
        return rms_norm(hidden_states, self.weight, self.eps)

    def extra_repr(self) -> str:
        """Return what `print(module)` shows."""
        return f"{self.weight.shape[0]}, eps={self.eps}"
