"""The public RMS norm, with its checks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Scale each row to unit root mean square, without centring it (T5's layer norm).

    `y = x / sqrt(mean(x^2) + eps) * weight`, the mean over the last dimension.

    One rule for types: the output has the type of `x`, whatever the type of `weight` and also under autocast. The row
    statistics, the product with the weight and the gradient of the weight are computed in float32 (float64 where `x` is
    float64) and rounded once, at the end.

    Args:
        x: Input [..., D], any leading shape (empty too), any strides.
        weight: Gain [D]; its gradient comes back in its own type.
        eps: Added to the mean square.

    Returns:
        Tensor of the shape and type of `x`.

    Raises:
        ValueError: Shapes, types or devices do not fit, or `eps` is negative.

    Reference: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.
    """
    if weight.ndim != 1 or x.ndim == 0 or x.shape[-1] != weight.shape[0]:
        raise ValueError(
            "rms_norm: expected x [..., D] and weight [D], "
            f"got x of shape {tuple(x.shape)} and weight of shape {tuple(weight.shape)}"
        )
    if not (x.is_floating_point() and weight.is_floating_point()):
        raise ValueError(f"rms_norm: expected floating types, got x {x.dtype} and weight {weight.dtype}")
    if x.device != weight.device:
        raise ValueError(f"rms_norm: expected one device, got x on {x.device} and weight on {weight.device}")
    if eps < 0:
        raise ValueError(f"rms_norm: expected eps >= 0, got {eps}")
    if x.dtype == weight.dtype:
        y = F.rms_norm(x, weight.shape, weight, eps)
    else:
        # PyTorch's fused kernel takes one type only
        wide = torch.promote_types(x.dtype, torch.float32)
        y = F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps)
    return y.to(x.dtype)
