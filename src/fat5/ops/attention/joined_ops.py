"""Attention on joined projections as custom ops, one pair a backend: their gradient is one tensor, joined likewise."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fat5.ops.attention.custom_ops import NOT_COMPUTED, RunBackward, RunForward, keep, kept, takes_settings
from fat5.ops.attention.problem import Problem, accumulation_dtype
from fat5.ops.operators import operator, register_autograd


def define_joined_ops(name: str, run_forward: RunForward, run_backward: RunBackward) -> tuple[Any, Any]:
    """Register `fat5::{name}_joined_attention` and its backward, and return both.

    They take q, k and v as one tensor [..., L, 3, H, D]; or k and v as one [..., L, 2, H, D], and q.

    Args:
        name: Name of the backend.
        run_forward: As in `custom_ops.define_ops`.
        run_backward: As there; it writes into slices of the joined gradient.
    """

    def fake_forward(joined, q, *settings):
        problem = Problem(*joined_parts(joined, q), *settings)
        lse = joined.new_empty(problem.lse_shape, dtype=accumulation_dtype(joined.dtype))
        return joined.new_empty(problem.q.shape), lse

    @operator(f"{name}_joined_attention", fake=fake_forward)
    @takes_settings
    def forward(joined: Tensor, q: Tensor | None, *settings: Any) -> tuple[Tensor, Tensor]:
        return run_forward(Problem(*joined_parts(joined, q), *settings))

    def fake_backward(grad_out, out, lse, bias_grad, joined, q, bias, *settings):
        return _room(joined, joined), _room(q, joined), _room(bias if bias_grad else None, joined)

    @operator(f"{name}_joined_attention_backward", fake=fake_backward)
    @takes_settings
    def backward(
        grad_out: Tensor,
        out: Tensor,
        lse: Tensor,
        bias_grad: bool,
        joined: Tensor,
        q: Tensor | None,
        *settings: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        problem = Problem(*joined_parts(joined, q), *settings)
        grad_joined, grad_q = _room(joined, joined), _room(q, joined)
        gradients = joined_parts(grad_joined, None if q is None else grad_q)
        *_, grad_bias = run_backward(problem, grad_out, out, lse, bias_grad, gradients)
        return grad_joined, grad_q, joined.new_zeros(NOT_COMPUTED) if grad_bias is None else grad_bias

    def differentiate(ctx, grad_out, grad_lse):
        out, lse, *inputs = kept(ctx)
        if grad_out is None:
            return (None,) * len(inputs)
        bias_grad = inputs[2] is not None and ctx.needs_input_grad[2]
        grad_joined, grad_q, grad_bias = backward(grad_out, out, lse, bias_grad, *inputs)
        grads = (grad_joined, None if inputs[1] is None else grad_q, grad_bias if bias_grad else None)
        return *grads, *(None,) * (len(inputs) - 3)

    register_autograd(forward, differentiate, setup_context=keep)
    return forward, backward


def joined_parts(joined: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, or their gradients, where they lie in [..., L, 3, H, D], or in [..., L, 2, H, D] and q."""
    if q is None:
        q, k, v = joined.unbind(-3)
    else:
        k, v = joined.unbind(-3)
    return q, k, v


def _room(x: Tensor | None, neighbour: Tensor) -> Tensor:
    """Return memory for the gradient of a tensor, contiguous; without one, for nothing, beside its neighbour."""
    return neighbour.new_empty(NOT_COMPUTED) if x is None else x.new_empty(x.shape)
