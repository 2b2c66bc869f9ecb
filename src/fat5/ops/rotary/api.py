"""The public rotary position embedding, with its checks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fat5.ops.kernels_or_torch import HAS_TRITON, takes_kernels

if HAS_TRITON:
    from fat5.ops.rotary.custom_ops import triton_rotary

_MAX_HEAD_DIM = 1024


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


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, backend: str = "auto") -> Tensor:
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
        backend: "auto", "torch", or "triton" for the kernel: bfloat16, float16 and float32 on a GPU, heads of up to
            1,024 channels, tables that take no gradient.

    Returns:
        Tensor of the shape and type of `x`.

    Raises:
        ValueError: Shapes, types or devices do not fit, or the backend is unknown or does not work.

    Reference: Su et al., RoFormer: enhanced transformer with rotary position embedding, arXiv:2104.09864.
    """
    _check_inputs("apply_rotary", x, cos, sin)
    if takes_kernels("apply_rotary", backend, x, refusal=_refusal(x, cos, sin)):
        tables = _rows(x, cos), _rows(x, sin)
        return triton_rotary(_batch(x), None, *tables, *tables, interleaved, False)[0].reshape(x.shape)
    return _torch_rotary(x, cos, sin, interleaved)


def apply_rotary_qk(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cos: Tensor | None = None,
    key_sin: Tensor | None = None,
    *,
    interleaved: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, by the kernel in one launch; otherwise as `apply_rotary`.

    Args:
        q: [..., L, H, D].
        k: Shaped and typed as q.
        cos: The queries', [..., L, R / 2].
        sin: Shaped as `cos`.
        key_cos: The keys', shaped as `cos`, where a scale such as xPos's makes them differ; by default the queries'.
        key_sin: Likewise.
        interleaved: As in `apply_rotary`.
        backend: As in `apply_rotary`.

    Returns:
        The rotated queries and keys.

    Raises:
        ValueError: Shapes, types or devices do not fit, or the backend is unknown or does not work.
    """
    key_cos, key_sin = cos if key_cos is None else key_cos, sin if key_sin is None else key_sin
    _check_inputs("apply_rotary_qk", q, cos, sin)
    _check_inputs("apply_rotary_qk", k, key_cos, key_sin)
    if q.shape != k.shape or q.dtype != k.dtype or cos.shape != key_cos.shape:
        raise ValueError(
            "apply_rotary_qk: expected k shaped and typed as q, and its tables shaped as those of q, got q "
            f"{list(q.shape)} {q.dtype}, k {list(k.shape)} {k.dtype}, cos {list(cos.shape)}, key_cos "
            f"{list(key_cos.shape)}"
        )
    if takes_kernels("apply_rotary_qk", backend, q, refusal=_refusal(q, cos, sin, key_cos, key_sin)):
        tables = _rows(q, cos), _rows(q, sin)
        same = key_cos is cos and key_sin is sin
        key_tables = tables if same else (_rows(k, key_cos), _rows(k, key_sin))
        turned = triton_rotary(_batch(q), _batch(k), *tables, *key_tables, interleaved, False)
        return turned[0].reshape(q.shape), turned[1].reshape(k.shape)
    return _torch_rotary(q, cos, sin, interleaved), _torch_rotary(k, key_cos, key_sin, interleaved)


def _torch_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
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


def _batch(x: Tensor) -> Tensor:
    """Return queries or keys as [B, L, H, D], a view wherever there is one."""
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _rows(x: Tensor, table: Tensor) -> Tensor:
    """Return a table as [1 or B, L, R / 2] in float32."""
    *lead, length = x.shape[:-2]
    half = table.shape[-1]
    if math.prod(table.shape[:-2]) == 1:
        return table.float().reshape(1, table.shape[-2], half).expand(1, length, half)
    return table.float().expand(*lead, length, half).reshape(math.prod(lead), length, half)


def _refusal(x: Tensor, *tables: Tensor) -> str | None:
    if torch.is_grad_enabled() and any(table.requires_grad for table in tables):
        return "cos or sin take a gradient, which its kernel does not give"
    if not 1 <= x.shape[-1] <= _MAX_HEAD_DIM:
        return f"its kernel takes heads of 1 to {_MAX_HEAD_DIM:,} channels, not {x.shape[-1]}"
    return None


def _check_dim(name: str, dim: int) -> None:
    if dim < 2 or dim % 2:
        raise ValueError(f"{name}: expected an even number of channels, at least 2, got dim={dim}")


def _check_inputs(name: str, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    shapes = f"x {list(x.shape)}, cos {list(cos.shape)}, sin {list(sin.shape)}"
    if x.ndim < 3 or cos.shape != sin.shape or cos.ndim < 2 or cos.ndim > x.ndim - 1:
        raise ValueError(f"{name}: expected x [..., L, H, D], cos and sin [..., L, R / 2], got {shapes}")
    lead = zip(reversed(cos.shape[:-1]), reversed(x.shape[:-2]), strict=False)
    if 2 * cos.shape[-1] > x.shape[-1] or any(n not in (1, m) for n, m in lead):
        raise ValueError(
            f"{name}: expected cos and sin of at most {x.shape[-1] // 2} pairs that broadcast to "
            f"{list(x.shape[:-2])}, got {shapes}"
        )
    if not all(t.is_floating_point() for t in (x, cos, sin)):
        raise ValueError(f"{name}: expected floating types, got {x.dtype}, {cos.dtype} and {sin.dtype}")
    if x.device != cos.device or x.device != sin.device:
        raise ValueError(f"{name}: expected one device, got x on {x.device}, cos on {cos.device}")
