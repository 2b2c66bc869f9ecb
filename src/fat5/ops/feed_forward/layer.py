"""The whole layer as one step of autograd, the activation being made inside the first product."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, autograd
from torch.autograd.function import once_differentiable

from fat5.ops.activation.custom_ops import triton_joined_gated_gelu_backward
from fat5.ops.activation.linear import weight_gradient
from fat5.ops.feed_forward.custom_ops import triton_feed_forward_inner


class GatedFeedForward(autograd.Function):
    """`linear(gelu(gate) * up, out_weight)` of `linear(x, weight)`.

    All other products are PyTorch's, and stand in a compiled graph as such. It keeps the projection, and the activation
    where asked to; else the kernel of the activation's gradient makes that again. Of inputs it keeps those that the
    gradients asked for are made of: with frozen weights not x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, out_weight: Tensor, tanh: bool, keep_inner: bool) -> Tensor:
        """Return [..., any] of x [..., E] and weights [2 D, E] and [any, D]."""
        joined, inner = triton_feed_forward_inner(x, weight, tanh, True)
        x_needs, weight_needs, out_weight_needs = ctx.needs_input_grad[:3]
        ctx.save_for_backward(
            x if weight_needs else None,
            weight if x_needs else None,
            out_weight,
            joined,
            inner if keep_inner and out_weight_needs else None,
        )
        ctx.tanh, ctx.keep_inner = tanh, keep_inner
        return F.linear(inner, out_weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and both weights."""
        x, weight, out_weight, joined, kept = ctx.saved_tensors
        x_needs, weight_needs, out_weight_needs = ctx.needs_input_grad[:3]
        again = out_weight_needs and not ctx.keep_inner
        grad_joined, inner = triton_joined_gated_gelu_backward(grad @ out_weight, joined, ctx.tanh, again)
        grad_out_weight = weight_gradient(grad, kept if ctx.keep_inner else inner) if out_weight_needs else None
        grad_x = grad_joined @ weight if x_needs else None
        return grad_x, weight_gradient(grad_joined, x) if weight_needs else None, grad_out_weight, None, None
