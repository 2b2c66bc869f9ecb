"""The public gated GELU, with its checks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fat5.ops.kernels_or_torch import HAS_TRITON, takes_kernels

if HAS_TRITON:
    from fat5.ops.activation.custom_ops import triton_gated_gelu

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
    if approximate not in _APPROXIMATIONS:
        raise ValueError(f"gated_gelu: expected approximate='tanh' or 'none', got {approximate!r}")
    if takes_kernels("gated_gelu", backend, gate):
        return triton_gated_gelu(gate, up, approximate == "tanh")
    return F.gelu(gate, approximate=approximate) * up
