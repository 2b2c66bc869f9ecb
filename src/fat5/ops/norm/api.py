"""The public RMS norm, alone and behind a residual addition, with its checks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fat5.ops.kernels_or_torch import HAS_TRITON, takes_kernels
from fat5.ops.norm.residual import add_residual
from fat5.ops.norm.tiles import MAX_WIDTH
from fat5.ops.operators import call

if HAS_TRITON:
    from fat5.ops.norm.custom_ops import triton_add_rms_norm, triton_rms_norm


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, backend: str = "auto") -> Tensor:
    """Scale each row to unit root mean square, without centring it (T5's layer norm).

    `y = x / sqrt(mean(x^2) + eps) * weight`, the mean over the last dimension.

    One rule for types: the output has the type of `x`, whatever the type of `weight` and also under autocast. The row
    statistics, the product with the weight and the gradient of the weight are computed in float32 (float64 where `x` is
    float64) and rounded once, at the end.

    Args:
        x: Input [..., D], any leading shape (empty too), any strides.
        weight: Gain [D]; its gradient comes back in its own type.
        eps: Added to the mean square.
        backend: "auto", "torch", or "triton" for the kernels: rows of up to 65,536 in bfloat16, float16 and float32, on
            a GPU. They give first derivatives alone.

    Returns:
        Tensor of the shape and type of `x`.

    Raises:
        ValueError: Shapes, types or devices do not fit, `eps` is negative, or the backend is unknown or does not work.

    Reference: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.
    """
    _check("rms_norm", x, weight, eps)
    if takes_kernels("rms_norm", backend, x, weight, refusal=_refusal(x)):
        return call(triton_rms_norm, x, weight, eps)[0]
    return _torch_rms_norm(x, weight, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Add to the residual stream and normalise the sum, which is read and written once.

    `total = x + residual`, `y = rms_norm(total, weight, eps)`.

    The sum has the wider of both types, and so has the output; the norm sees the rounded sum. A float16 sum is clamped
    to +-64,512, as T5 clamps its states, and passes no gradient where it was. The rest is `rms_norm`'s.

    Args:
        x: [..., D], such as the output of a sublayer.
        residual: Shaped as x; never changed.
        weight: Gain [D]; its gradient comes back in its own type.
        eps: Added to the mean square.
        backend: As in `rms_norm`.

    Returns:
        The normalised sum and the sum, both [..., D].

    Raises:
        ValueError: As `rms_norm`, or x and residual differ in shape or device.
    """
    if x.shape != residual.shape or x.device != residual.device or not residual.is_floating_point():
        raise ValueError(
            "add_rms_norm: expected x and residual of one shape, both floating and on one device, got x "
            f"{tuple(x.shape)} {x.dtype} on {x.device} and residual {tuple(residual.shape)} {residual.dtype} on "
            f"{residual.device}"
        )
    _check("add_rms_norm", x, weight, eps)
    if takes_kernels("add_rms_norm", backend, x, residual, weight, refusal=_refusal(x)):
        y, total, _ = call(triton_add_rms_norm, x, residual, weight, eps)
        return y, total
    total = add_residual(x, residual)
    return _torch_rms_norm(total, weight, eps), total


def _torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == weight.dtype:
        y = F.rms_norm(x, weight.shape, weight, eps)
        return y if y.dtype == x.dtype else y.to(x.dtype)  # under autocast it is float32
    # PyTorch's fused kernel takes one type only
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps).to(x.dtype)


def _check(name: str, x: Tensor, weight: Tensor, eps: float) -> None:
    if weight.ndim != 1 or x.ndim == 0 or x.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"{name}: expected x [..., D] and weight [D], "
            f"got x of shape {tuple(x.shape)} and weight of shape {tuple(weight.shape)}"
        )
    if not (x.is_floating_point() and weight.is_floating_point()):
        raise ValueError(f"{name}: expected floating types, got x {x.dtype} and weight {weight.dtype}")
    if x.device != weight.device:
        raise ValueError(f"{name}: expected one device, got x on {x.device} and weight on {weight.device}")
    if eps < 0:
        raise ValueError(f"{name}: expected eps >= 0, got {eps}")


def _refusal(x: Tensor) -> str | None:
    width = x.shape[-1]
    return None if 1 <= width <= MAX_WIDTH else f"its kernels take rows of 1 to {MAX_WIDTH:,} elements, not {width}"
