"""The norm's kernels as custom ops: opaque to torch.compile, with a fake form and a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fat5.ops.norm.launch import run_backward, run_forward
from fat5.ops.operators import operator, register_autograd

_NOT_COMPUTED = 0  # elements of the tensor that stands for a gradient nobody asked for


def _fake_norm(x, weight, eps):
    return x.new_empty(x.shape), _fake_rstd(x)


@operator("triton_rms_norm", fake=_fake_norm)
def triton_rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalised rows and the reciprocals of their root mean squares."""
    y, _, rstd = run_forward(x, None, weight, eps)
    return y, rstd


def _fake_sum(x, residual, weight, eps):
    dtype = torch.promote_types(x.dtype, residual.dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape, dtype=dtype), _fake_rstd(x)


@operator("triton_add_rms_norm", fake=_fake_sum)
def triton_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised rows of a sum, the sum, and the reciprocals of the root mean squares."""
    return run_forward(x, residual, weight, eps)


def _fake_backward(grad_y, grad_total, total, weight, rstd, fused, input_grad, weight_grad):
    grad = total.new_empty(total.shape if input_grad else _NOT_COMPUTED)
    return grad, weight.new_empty(weight.shape) if weight_grad else total.new_empty(_NOT_COMPUTED)


@operator("triton_rms_norm_backward", fake=_fake_backward)
def triton_rms_norm_backward(
    grad_y: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    weight: Tensor,
    rstd: Tensor,
    fused: bool,
    input_grad: bool,
    weight_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of what was normalised and of the weight; empty where nobody asks."""
    gradients = run_backward(grad_y, grad_total, total, weight, rstd, fused, input_grad, weight_grad)
    grad, grad_weight = (total.new_empty(_NOT_COMPUTED) if x is None else x for x in gradients)
    return grad, grad_weight


def _fake_rstd(x: Tensor) -> Tensor:
    return x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)


def _setup_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.set_materialize_grads(False)


def _differentiate_norm(ctx: Any, grad_y: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if grad_y is None:
        return None, None, None
    x, weight, rstd = ctx.saved_tensors
    needs = ctx.needs_input_grad
    grad, grad_weight = triton_rms_norm_backward(grad_y, None, x, weight, rstd, False, needs[0], needs[1])
    return grad if needs[0] else None, grad_weight if needs[1] else None, None


def _setup_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, _ = inputs
    _, total, rstd = output
    ctx.save_for_backward(total, weight, rstd)
    ctx.types = x.dtype, residual.dtype
    ctx.set_materialize_grads(False)


def _differentiate_sum(ctx: Any, grad_y: Tensor | None, grad_total: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    total, weight, rstd = ctx.saved_tensors
    *needs, weight_grad = ctx.needs_input_grad[:3]
    if grad_y is None and grad_total is None:
        return None, None, None, None
    if grad_y is None:
        # Zeros rather than the bare gradient: the kernel also knows which elements were clamped.
        grad_y = torch.zeros_like(total)
    grad, grad_weight = triton_rms_norm_backward(grad_y, grad_total, total, weight, rstd, True, any(needs), weight_grad)
    both = (grad.to(dtype) if need else None for need, dtype in zip(needs, ctx.types, strict=True))
    return *both, grad_weight if weight_grad else None, None


register_autograd(triton_rms_norm, _differentiate_norm, setup_context=_setup_norm)
register_autograd(triton_add_rms_norm, _differentiate_sum, setup_context=_setup_sum)
