"""FIRE: a bias that is a learned function of the distance, interpolated by how far the sequence reaches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

INITIAL_SCALE = 0.1
_EPSILON = 1e-6


class FireBias(nn.Module):
    """Functional interpolation for relative positions.

    `bias[h, i, j] = f(psi(|i - j|) / psi(max(L, i, j)))[h]` with `psi(x) = log(c x + 1)`, and f one hidden layer of
    ReLU units. c, L and f are learned. The paper defines the bias where the key j comes at or before the query i; there
    max(i, j) is its i. In an encoder the same formula stays within [0, 1] for later keys, and treats both directions
    alike.

    The bias exists in full: its memory and time are quadratic in the length.

    Args:
        num_heads: Heads.
        width: Hidden units of f.
        threshold: Initial L in tokens: within it the bias depends on the distance alone.

    Reference: Li et al., Functional interpolation for relative positions improves long context transformers,
        arXiv:2310.04418.
    """

    def __init__(self, num_heads: int, *, width: int = 32, threshold: float = 512.0) -> None:
        super().__init__()
        self.initial_threshold = threshold
        # One element each, not scalars: sharded training does not take parameters without a dimension.
        self.scale = nn.Parameter(torch.full((1,), INITIAL_SCALE))
        self.threshold_factor = nn.Parameter(torch.ones(1))
        self.hidden = nn.Linear(1, width)
        self.output = nn.Linear(width, num_heads)

    def forward(self, query_positions: Tensor, key_positions: Tensor | None = None) -> Tensor:
        """Return the bias of each query and key, in float32 (float64 for float64 parameters), also under autocast.

        Args:
            query_positions: Int tensor [1 or B, Lq], from 0 in each sequence.
            key_positions: Int tensor [1 or B, Lk], likewise; by default those of the queries.

        Returns:
            [1 or B, num_heads, Lq, Lk].
        """
        dtype = torch.promote_types(self.scale.dtype, torch.float32)
        scale = self.scale.to(dtype).abs()
        threshold = (self.threshold_factor.to(dtype) * self.initial_threshold).abs()
        keys = query_positions if key_positions is None else key_positions
        query, key = query_positions.to(dtype)[:, :, None], keys.to(dtype)[:, None]
        distance = (query - key).abs()
        reach = torch.maximum(query, key).maximum(threshold)
        share = torch.log1p(scale * distance) / (torch.log1p(scale * reach) + _EPSILON)
        with torch.autocast(query.device.type, enabled=False):
            hidden = F.linear(share[..., None], self.hidden.weight.to(dtype), self.hidden.bias.to(dtype)).relu()
            bias = F.linear(hidden, self.output.weight.to(dtype), self.output.bias.to(dtype))
        return bias.permute(0, 3, 1, 2).contiguous()

    def extra_repr(self) -> str:
        """Return what `print(module)` shows."""
        return f"threshold={self.initial_threshold}"
