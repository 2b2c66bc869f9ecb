"""The public rotary position embedding, with its checks."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_phases(
    positions: Tensor, dim: int, *, theta: float = 10000.0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the phase of each position and pair of channels.

    `phase[..., p] = positions[...] * theta ** (-2 p / dim)`

    The frequencies are computed in float64 and rounded to `dtype` once; phases never see a half-precision type, in
    which positions above 256 (bfloat16) or 2,048 (float16) are no longer integers.

    Args:
        positions: Integers of any shape.
        dim: Channels that are rotated, an even number.
        theta: Base of the frequencies.
        dtype: Type of the phases and the result, float32 or float64.

    Returns:
        Cosine and sine, each [..., dim / 2].

    Raises:
        ValueError: `dim` is odd or below 2, `theta` is not above 0, or `dtype` is narrower than float32.

    Reference: Su et al., RoFormer: enhanced transformer with rotary position embedding, arXiv:2104.09864.
    """
    _check_dim("rotary_phases", dim)
    if not theta > 0:
        raise ValueError(f"rotary_phases: expected theta > 0, got {theta}")
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"rotary_phases: expected float32 or float64, got {dtype}")
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / -dim
    phases = positions[..., None].to(dtype) * (theta**exponents).to(dtype)
    return phases.cos(), phases.sin()


def xpos_scale(positions: Tensor, dim: int, *, scale_base: float = 512.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return xPos's factor of each position and pair of channels, below 1 after position 0.

    `scale[..., p] = ((2 p / dim + 0.4) / 1.4) ** (positions[...] / scale_base)`

    Queries are multiplied by it and keys are divided by it: the product decays with the distance where the key comes
    first, and grows without bound where it comes last. So xPos is for causal attention alone.

    Args:
        positions: Integers of any shape.
        dim: Channels that are rotated, an even number.
        scale_base: Distance in tokens over which the first pair decays by a factor of 0.4 / 1.4.
        dtype: Type of the result.

    Returns:
        [..., dim / 2].

    Raises:
        ValueError: `dim` is odd or below 2, or `scale_base` is not above 0.

    Reference: Sun et al., A length-extrapolatable transformer, arXiv:2212.10554.
    """
    _check_dim("xpos_scale", dim)
    if not scale_base > 0:
        raise ValueError(f"xpos_scale: expected scale_base > 0, got {scale_base}")
    pairs = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim
    log_zeta = ((pairs + 0.4) / 1.4).log().to(dtype)
    return (positions[..., None].to(dtype) / scale_base * log_zeta).exp()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate pairs of the first channels of each head; the other channels pass.

    `y1 = x1 * cos - x2 * sin`, `y2 = x2 * cos + x1 * sin`

    One rule for types: the output has the type of `x`, whatever the type of `cos` and `sin` and also under autocast.
    The products are computed in float32 (float64 where `x` is float64) and rounded once, at the end. A scale, such as
    xPos's, is part of `cos` and `sin`.

    Args:
        x: Queries or keys [..., L, H, D], padded or packed, any strides. Values are never rotated.
        cos: [..., L, R / 2], R <= D channels to rotate; leading dimensions broadcast to those of `x`.
        sin: Shaped as `cos`.
        interleaved: Pair neighbours (0, 1), (2, 3), ... (RoFormer, GPT-J) instead of channel p with p + R / 2
            (GPT-NeoX, LLaMA).

    Returns:
        Tensor of the shape and type of `x`.

    Raises:
        ValueError: Shapes, types or devices do not fit.

    Reference: Su et al., RoFormer: enhanced transformer with rotary position embedding, arXiv:2104.09864.
    """
    _check_inputs(x, cos, sin)
    half = cos.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos[..., None, :].to(wide), sin[..., None, :].to(wide)  # [..., L, 1, R / 2]
    rotated = x[..., : 2 * half].to(wide)
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated[..., :half], rotated[..., half:]
    turned = [first * cos - second * sin, second * cos + first * sin]
    if interleaved:
        turned = [torch.stack(turned, -1).flatten(-2)]
    return torch.cat([*(part.to(x.dtype) for part in turned), x[..., 2 * half :]], -1)


def _check_dim(name: str, dim: int) -> None:
    if dim < 2 or dim % 2:
        raise ValueError(f"{name}: expected an even number of channels, at least 2, got dim={dim}")


def _check_inputs(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    shapes = f"x {list(x.shape)}, cos {list(cos.shape)}, sin {list(sin.shape)}"
    if x.ndim < 3 or cos.shape != sin.shape or cos.ndim < 2 or cos.ndim > x.ndim - 1:
        raise ValueError(f"apply_rotary: expected x [..., L, H, D], cos and sin [..., L, R / 2], got {shapes}")
    lead = zip(reversed(cos.shape[:-1]), reversed(x.shape[:-2]), strict=False)
    if 2 * cos.shape[-1] > x.shape[-1] or any(n not in (1, m) for n, m in lead):
        raise ValueError(
            f"apply_rotary: expected cos and sin of at most {x.shape[-1] // 2} pairs that broadcast to "
            f"{list(x.shape[:-2])}, got {shapes}"
        )
    if not all(t.is_floating_point() for t in (x, cos, sin)):
        raise ValueError(f"apply_rotary: expected floating types, got {x.dtype}, {cos.dtype} and {sin.dtype}")
    if x.device != cos.device or x.device != sin.device:
        raise ValueError(f"apply_rotary: expected one device, got x on {x.device}, cos on {cos.device}")
