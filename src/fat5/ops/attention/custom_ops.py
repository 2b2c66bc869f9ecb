"""Attention as custom ops, one pair a backend: opaque to torch.compile, with a fake form and a gradient."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

from torch import Tensor

from fat5.ops.attention.problem import Gradients, Problem, accumulation_dtype
from fat5.ops.operators import operator, register_autograd

RunForward = Callable[[Problem], tuple[Tensor, Tensor]]
RunBackward = Callable[[Problem, Tensor, Tensor, Tensor, bool, Gradients], tuple[Tensor, Tensor, Tensor, Tensor | None]]

NOT_COMPUTED = 0  # elements of the tensor that stands for a gradient nobody asked for


def takes_settings(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function that ends in `*settings` the fields of `Problem` behind q, k and v as its parameters."""
    signature, types = inspect.signature(function, eval_str=True), get_type_hints(Problem)
    *own, _ = signature.parameters.values()
    fields = [field.name for field in dataclasses.fields(Problem)[3:]]
    settings = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=types[name]) for name in fields
    ]
    function.__signature__ = signature.replace(parameters=[*own, *settings])  # type: ignore[attr-defined]
    return function


def define_ops(name: str, run_forward: RunForward, run_backward: RunBackward) -> tuple[Any, Any]:
    """Register `fat5::{name}_attention` and its backward, and return both.

    Args:
        name: Name of the backend.
        run_forward: Maps a problem to the output, shaped and typed as q, and the log-sum-exp of the scores in the
            accumulation type, `problem.lse_shape`, in whatever base the backend's own backward reads.
        run_backward: Maps a problem, the gradient of the output, both results of the forward, whether the bias takes a
            gradient, and memory for the gradients of q, k and v, to these, written there, and that of the bias.
    """

    def fake_forward(*arguments):
        problem = Problem(*arguments)
        lse = problem.q.new_empty(problem.lse_shape, dtype=accumulation_dtype(problem.q.dtype))
        return problem.q.new_empty(problem.q.shape), lse

    @operator(f"{name}_attention", fake=fake_forward)
    @takes_settings
    def forward(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
        return run_forward(Problem(q, k, v, *settings))

    def fake_backward(grad_out, out, lse, bias_grad, q, k, v, bias, *rest):
        grad_bias = bias.new_empty(bias.shape) if bias is not None and bias_grad else q.new_empty(NOT_COMPUTED)
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), grad_bias

    @operator(f"{name}_attention_backward", fake=fake_backward)
    @takes_settings
    def backward(
        grad_out: Tensor, out: Tensor, lse: Tensor, bias_grad: bool, q: Tensor, k: Tensor, v: Tensor, *settings: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        problem = Problem(q, k, v, *settings)
        grad_q, grad_k, grad_v, grad_bias = run_backward(
            problem, grad_out, out, lse, bias_grad, problem.room_for_gradients()
        )
        return grad_q, grad_k, grad_v, q.new_zeros(NOT_COMPUTED) if grad_bias is None else grad_bias

    def differentiate(ctx, grad_out, grad_lse):
        out, lse, *inputs = kept(ctx)
        if grad_out is None:
            return (None,) * len(inputs)
        bias_grad = inputs[3] is not None and ctx.needs_input_grad[3]
        *grads, grad_bias = backward(grad_out, out, lse, bias_grad, *inputs)
        return (*grads, grad_bias if bias_grad else None, *(None,) * (len(inputs) - 4))

    register_autograd(forward, differentiate, setup_context=keep)
    return forward, backward


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep results and arguments of a forward for its backward, which finds them by `kept`."""
    tensors = [x if isinstance(x, Tensor) else None for x in inputs]
    ctx.save_for_backward(*output, *tensors)
    ctx.settings = [None] * len(output) + [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.set_materialize_grads(False)


def kept(ctx: Any) -> list[Any]:
    """Return the results of a forward, and behind them its arguments."""
    return [x if setting is None else setting for x, setting in zip(ctx.saved_tensors, ctx.settings, strict=True)]
