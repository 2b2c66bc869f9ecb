"""Rotary position embedding by complex numbers in float64: the yardstick of the tests."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_reference(
    x: Tensor,
    positions: Tensor,
    dim: int,
    *,
    theta: float = 10000.0,
    interleaved: bool = False,
    scale_base: float | None = None,
    is_key: bool = False,
) -> Tensor:
    """Multiply each pair of channels, seen as a complex number, by `zeta ** (+-m / scale_base) * exp(i m w)`.

    Args:
        x: [..., L, H, D].
        positions: m, [..., L].
        dim: Channels that are rotated, from the first.
        theta: Base of the frequencies w.
        interleaved: Pairs are neighbours.
        scale_base: xPos's, or None for a plain rotation.
        is_key: xPos divides instead of multiplying.

    Returns:
        [..., L, H, D] in float64.
    """
    x = x.double()
    pairs = torch.arange(dim // 2, dtype=torch.float64)
    m = positions.double()[..., None, None]
    factor = torch.exp(1j * m * theta ** (-2 * pairs / dim))
    if scale_base is not None:
        factor = factor * ((2 * pairs / dim + 0.4) / 1.4) ** ((-m if is_key else m) / scale_base)
    first = torch.arange(0, dim, 2) if interleaved else torch.arange(dim // 2)
    second = first + 1 if interleaved else first + dim // 2
    turned = torch.complex(x[..., first], x[..., second]) * factor
    y = x.clone()
    y[..., first], y[..., second] = turned.real, turned.imag
    return y
