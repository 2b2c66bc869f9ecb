"""T5's layer norm as a module."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor, nn

from fat5.ops.norm import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, without mean or bias; see `fat5.ops.rms_norm`.

    Given a residual besides, it adds first, and returns the sum too; see `fat5.ops.add_rms_norm`.

    Args:
        hidden_size: Size D of the last dimension.
        eps: Added to the mean square.
        device: Where the weight is made.
        dtype: Type of the weight; the output keeps the type of the input in any case.
        backend: Backend of `fat5.ops.rms_norm`.

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
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.eps = eps
        self.backend = backend

    @overload
    def forward(self, hidden_states: Tensor) -> Tensor: ...

    @overload
    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the normalised states [..., D] in the type of the input; with a residual, those of the sum and it."""
        if residual is None:
            return rms_norm(hidden_states, self.weight, self.eps, backend=self.backend)
        return add_rms_norm(hidden_states, residual, self.weight, self.eps, backend=self.backend)

    def extra_repr(self) -> str:
        """Return what `print(module)` shows."""
        return f"{self.weight.shape[0]}, eps={self.eps}"
