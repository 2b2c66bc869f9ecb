"""Attention of one layer on keys and values of all layers as custom ops: one gradient, which each layer writes into.

The gradient by tensors that many layers take slices of would be one of zeros a layer, added up; or one of the slices,
copied together. Here it travels with the backward from the last layer to the first: each writes its slice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fat5.ops.attention.custom_ops import NOT_COMPUTED, RunBackward, RunForward, keep, kept, takes_settings
from fat5.ops.attention.problem import Problem, accumulation_dtype
from fat5.ops.operators import operator, register_autograd


@operator("room_for_shared_gradient", fake=lambda shared, layer, after: shared.new_empty(shared.shape))
def room_for_gradient(shared: Tensor, layer: int, after: Tensor) -> Tensor:
    """Return memory for the gradient of all layers, 0 in those above a layer.

    An operator, since torch.compile would write zeros where a traced function asks for memory alone, and would ask for
    it at the start of the backward, where memory is shortest: hence a tensor `after` which it is to be made.
    """
    if torch.is_anomaly_enabled():  # which looks at what is not written yet
        return shared.new_zeros(shared.shape)
    gradient = shared.new_empty(shared.shape)
    gradient.narrow(-4, layer + 1, shared.shape[-4] - layer - 1).zero_()
    return gradient


def define_shared_ops(name: str, run_forward: RunForward, run_backward: RunBackward) -> tuple[Any, Any]:
    """Register `fat5::{name}_shared_attention` and its backward, and return both.

    The forward takes keys and values of all layers, [..., L, layers, 2, H, D]; what the layer before returned as the
    third result, or the same keys and values where there is none; and q. By the second alone the gradient of the first
    goes back: through all layers to the first one. It is a tensor without memory.

    Args:
        name: Name of the backend.
        run_forward: As in `custom_ops.define_ops`.
        run_backward: As there; it writes into slices of the gradient of all layers.
    """

    def fake_forward(shared, link, q, layer, first, *settings):
        problem = Problem(q, *layer_parts(shared, layer), *settings)
        lse = q.new_empty(problem.lse_shape, dtype=accumulation_dtype(q.dtype))
        return q.new_empty(q.shape), lse, _new_link(shared)

    @operator(f"{name}_shared_attention", fake=fake_forward)
    @takes_settings
    def forward(
        shared: Tensor,
        link: Tensor,
        q: Tensor,
        layer: int,
        first: int,
        *settings: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        problem = Problem(q, *layer_parts(shared, layer), *settings)
        return *run_forward(problem), _new_link(shared)

    def fake_backward(gradient, grad_out, out, lse, bias_grad, shared, q, layer, bias, *settings):
        grad_bias = bias.new_empty(bias.shape) if bias is not None and bias_grad else q.new_empty(NOT_COMPUTED)
        return q.new_empty(q.shape), grad_bias

    @operator(f"{name}_shared_attention_backward", fake=fake_backward, mutates=["gradient"])
    @takes_settings
    def backward(
        gradient: Tensor,
        grad_out: Tensor,
        out: Tensor,
        lse: Tensor,
        bias_grad: bool,
        shared: Tensor,
        q: Tensor,
        layer: int,
        *settings: Any,
    ) -> tuple[Tensor, Tensor]:
        problem = Problem(q, *layer_parts(shared, layer), *settings)
        grad_q = q.new_empty(q.shape)
        *_, grad_bias = run_backward(problem, grad_out, out, lse, bias_grad, (grad_q, *layer_parts(gradient, layer)))
        return grad_q, q.new_zeros(NOT_COMPUTED) if grad_bias is None else grad_bias

    def setup_context(ctx, inputs, output):
        shared, _, *rest = inputs
        keep(ctx, (shared, None, *rest), output[:2])

    def differentiate(ctx, grad_out, grad_lse, gradient):
        out, lse, shared, _, q, layer, first, bias, *settings = kept(ctx)
        grads: list[Tensor | None] = [None] * (6 + len(settings))
        if grad_out is None and gradient is None:
            return tuple(grads)
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"fat5::{name}_shared_attention, as all attention here, has first derivatives alone; got a backward "
                "pass that is to be differentiated itself; expected create_graph=False, and for a product with second "
                "derivatives the difference of two gradients"
            )
        if gradient is None:
            gradient = room_for_gradient(shared, layer, grad_out)
        own = layer if grad_out is not None else layer + 1
        if first < own:  # layers that were not called, or whose output nobody used
            gradient.narrow(-4, first, own - first).zero_()
        if grad_out is not None:
            bias_grad = bias is not None and ctx.needs_input_grad[5]
            grad_q, grad_bias = backward(gradient, grad_out, out, lse, bias_grad, shared, q, layer, bias, *settings)
            grads[2], grads[5] = grad_q, grad_bias if bias_grad else None
        grads[1] = gradient
        return tuple(grads)

    register_autograd(forward, differentiate, setup_context=setup_context)
    return forward, backward


def layer_parts(shared: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Return k and v of a layer, or their gradients, where they lie in [..., L, layers, 2, H, D]."""
    k, v = shared.select(-4, layer).unbind(-3)
    return k, v


def _new_link(shared: Tensor) -> Tensor:
    return shared.new_empty(()).expand(shared.shape)
