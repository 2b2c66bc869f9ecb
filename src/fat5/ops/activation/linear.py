"""The activation and the projection behind it as one step of autograd, which keeps the joined projection alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fat5.ops.activation.custom_ops import triton_joined_gated_gelu, triton_joined_gated_gelu_backward


class GatedGeluLinear(torch.autograd.Function):
    """`linear(gelu(gate) * up, weight)`.

    The product's own backward would keep the activation, half the size of the projection, until then. Here the kernel
    of the activation's gradient writes it anew, as it has gate and up at hand.
    """

    @staticmethod
    def forward(ctx: Any, joined: Tensor, weight: Tensor, tanh: bool) -> Tensor:
        """Return [..., d_model] of a projection [..., 2 D], the gate in front, and a weight [d_model, D]."""
        ctx.save_for_backward(joined, weight)
        ctx.tanh = tanh
        return F.linear(triton_joined_gated_gelu(joined, tanh), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradients of the projection and the weight."""
        joined, weight = ctx.saved_tensors
        joined_needs, weight_needs, _ = ctx.needs_input_grad
        grad_inner = grad @ weight
        grad_joined, inner = triton_joined_gated_gelu_backward(grad_inner, joined, ctx.tanh, weight_needs)
        grad_weight = weight_gradient(grad, inner) if weight_needs else None
        return grad_joined if joined_needs else None, grad_weight, None


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of the weight of `linear(x, weight)` from that of its result, a sum over all leading axes."""
    rows = grad.reshape(-1, grad.shape[-1])
    return rows.t() @ x.reshape(rows.shape[0], x.shape[-1])
