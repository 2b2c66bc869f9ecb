"""The public gated GELU, of two projections or a joined one, and with the projection behind it; with its checks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fat5.ops.kernels_or_torch import HAS_TRITON, takes_kernels
from fat5.ops.operators import call

if HAS_TRITON:
    from fat5.ops.activation.custom_ops import triton_gated_gelu, triton_joined_gated_gelu
    from fat5.ops.activation.linear import GatedGeluLinear

_APPROXIMATIONS = ("tanh", "none")


def gated_gelu(gate: Tensor, up: Tensor, *, approximate: str = "tanh", backend: str = "auto") -> Tensor:
    """Multiply a projection by the GELU of another: `gelu(gate) * up`, the inside of T5 v1.1's feed-forward layers.

    `gelu(x) = x * Phi(x)`, Phi the standard normal distribution function, or T5's approximation of it,
    `0.5 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`.

    The kernels compute in float32 and round once, at the end; plain PyTorch also rounds the GELU. They keep the two
    projections alone for the backward, which computes the rest again.

    Args:
        gate: [..., D], any leading shape (empty too). Halves of one projection, rows of which lie apart, are read in
            place.
        up: Shaped and typed as gate.
        approximate: "tanh" or "none", as in `torch.nn.functional.gelu`; T5 v1.1's own is the former.
        backend: "auto", "torch", or "triton" for the kernels: bfloat16, float16 and float32 on a GPU. They give first
            derivatives alone.

    Returns:
        Tensor of the shape and type of `gate`.

    Raises:
        ValueError: Shapes, types or devices differ, `approximate` is unknown, or the backend is or does not work.

    Reference: Shazeer, GLU variants improve Transformer, arXiv:2002.05202.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.device != up.device or not gate.is_floating_point():
        raise ValueError(
            "gated_gelu: expected gate and up of one shape, one floating type and on one device, got gate "
            f"{list(gate.shape)} {gate.dtype} on {gate.device} and up {list(up.shape)} {up.dtype} on {up.device}"
        )
    check_approximation("gated_gelu", approximate)
    if takes_kernels("gated_gelu", backend, gate):
        return call(triton_gated_gelu, gate, up, approximate == "tanh")
    return F.gelu(gate, approximate=approximate) * up


def joined_gated_gelu(joined: Tensor, *, approximate: str = "tanh", backend: str = "auto") -> Tensor:
    """`gated_gelu` of the halves of one projection, whose gradient is one tensor too.

    Args:
        joined: [..., 2 D], gate in front of up.
        approximate: As in `gated_gelu`.
        backend: As there.

    Returns:
        [..., D], typed as `joined`.

    Raises:
        ValueError: As `gated_gelu`, or an odd last dimension.
    """
    _check_joined("joined_gated_gelu", joined, approximate)
    if takes_kernels("joined_gated_gelu", backend, joined):
        return call(triton_joined_gated_gelu, joined, approximate == "tanh")
    return _plain(joined, approximate)


def gated_gelu_linear(joined: Tensor, weight: Tensor, *, approximate: str = "tanh", backend: str = "auto") -> Tensor:
    """The gated GELU and the projection behind it: `linear(gelu(gate) * up, weight)`.

    As one step of autograd it keeps `joined` alone for the backward. PyTorch's own product would keep the activation
    besides; here the kernel of the gradient writes it anew.

    Args:
        joined: [..., 2 D], gate in front of up.
        weight: [E, D], as that of `torch.nn.Linear`; type and device of `joined`.
        approximate: As in `gated_gelu`.
        backend: As there. "torch" is plain PyTorch, and keeps what that keeps.

    Returns:
        [..., E]. Under autocast both inputs are cast to autocast's type at the door.

    Raises:
        ValueError: As `gated_gelu`, an odd last dimension, or a weight that does not fit.
    """
    _check_joined("gated_gelu_linear", joined, approximate)
    device = joined.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        joined, weight = joined.to(dtype), weight.to(dtype)
    fits = weight.ndim == 2 and 2 * weight.shape[1] == joined.shape[-1]
    if not fits or weight.dtype != joined.dtype or weight.device != joined.device:
        raise ValueError(
            f"gated_gelu_linear: expected a weight [any, {joined.shape[-1] // 2}] {joined.dtype} on {joined.device} "
            f"for a projection {list(joined.shape)}, got {list(weight.shape)} {weight.dtype} on {weight.device}"
        )
    if not takes_kernels("gated_gelu_linear", backend, joined):
        return F.linear(_plain(joined, approximate), weight)
    if torch.is_grad_enabled() and (joined.requires_grad or weight.requires_grad):
        return GatedGeluLinear.apply(joined, weight, approximate == "tanh")
    return F.linear(call(triton_joined_gated_gelu, joined, approximate == "tanh"), weight)


def check_approximation(function: str, approximate: str) -> None:
    """Raise ValueError for an unknown name, in the words of the function that got it."""
    if approximate not in _APPROXIMATIONS:
        raise ValueError(f"{function}: expected approximate='tanh' or 'none', got {approximate!r}")


def _check_joined(function: str, joined: Tensor, approximate: str) -> None:
    if joined.ndim == 0 or joined.shape[-1] % 2 or not joined.is_floating_point():
        raise ValueError(
            f"{function}: expected a floating projection [..., 2 D], gate and up side by side, got "
            f"{list(joined.shape)} {joined.dtype}"
        )
    check_approximation(function, approximate)


def _plain(joined: Tensor, approximate: str) -> Tensor:
    gate, up = joined.chunk(2, -1)
    return F.gelu(gate, approximate=approximate) * up
