"""Rotary positions of one stack: the tables of cosines and sines, made once a forward."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fat5.nn.layout import MovesToDevice
from fat5.nn.position.settings import PositionSettings
from fat5.ops.rotary import apply_rotary_qk, rotary_phases, xpos_scale


@dataclass(frozen=True, eq=False)  # torch.compile hashes what is called, before its fields are there
class Rotation(MovesToDevice):
    """Rotates queries and keys by their positions; values are never rotated.

    Args:
        query_cos: [..., L, R / 2] in float32 at least; leading dimensions broadcast to those of the queries.
        query_sin: Shaped as query_cos.
        key_cos: The keys'.
        key_sin: The keys'.
        interleaved: Pairs of channels are neighbours.
        backend: Backend of `fat5.ops.apply_rotary_qk`.
    """

    query_cos: Tensor
    query_sin: Tensor
    key_cos: Tensor
    key_sin: Tensor
    interleaved: bool
    backend: str = "auto"

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotated queries and keys, [..., L, H, D], in their own type."""
        tables = self.query_cos, self.query_sin, self.key_cos, self.key_sin
        return apply_rotary_qk(q, k, *tables, interleaved=self.interleaved, backend=self.backend)


def make_rotation(
    settings: PositionSettings, positions: Tensor, longest: int, head_dim: int, *, causal: bool, dtype: torch.dtype
) -> Rotation:
    """Return the rotation of tokens at these positions.

    Args:
        settings: Those of a rotary encoding.
        positions: Int tensor, [..., L].
        longest: Bound on the positions, on the host.
        head_dim: Width of a head.
        causal: False leaves out xPos's scale, which grows without bound where the key comes last.
        dtype: Type of queries and keys.

    Raises:
        ValueError: xPos's scale would leave the range of `dtype` within `longest` positions.
    """
    dim, wide = settings.rotary_dim(head_dim), torch.promote_types(dtype, torch.float32)
    cos, sin = rotary_phases(positions, dim, theta=settings.rotary_theta, dtype=wide)
    if settings.rotary_scale_base is None or not causal:
        return Rotation(cos, sin, cos, sin, settings.rotary_interleaved)
    _check_scale(longest, settings.rotary_scale_base, dtype)
    scale = xpos_scale(positions, dim, scale_base=settings.rotary_scale_base, dtype=wide)
    return Rotation(cos * scale, sin * scale, cos / scale, sin / scale, settings.rotary_interleaved)


def _check_scale(longest: int, scale_base: float, dtype: torch.dtype) -> None:
    # Keys grow by 1.4 / 0.4 every scale_base tokens; 2 ** 10 is left for the keys themselves.
    limit = int(scale_base * math.log(torch.finfo(dtype).max / 2**10) / math.log(1.4 / 0.4))
    if longest > limit:
        raise ValueError(
            f"got sequences of up to {longest} positions with rotary_scale_base={scale_base}; xPos's scale leaves the "
            f"range of {dtype} after {limit}: expected a rotary_scale_base of at least "
            f"{math.ceil(scale_base * longest / max(limit, 1))}"
        )
