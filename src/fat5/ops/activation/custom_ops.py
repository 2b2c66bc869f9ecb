"""The activation's kernels as custom ops: opaque to torch.compile, with a fake form and a gradient.

Of two projections; and of one that holds both side by side, whose gradient is one tensor.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fat5.ops.activation.launch import run_backward, run_forward, run_joined_backward
from fat5.ops.operators import operator, register_autograd

_NOT_COMPUTED = 0  # elements of the tensor that stands for a gradient nobody asked for


def _fake(gate, up, tanh):
    return gate.new_empty(gate.shape)


@operator("triton_gated_gelu", fake=_fake)
def triton_gated_gelu(gate: Tensor, up: Tensor, tanh: bool) -> Tensor:
    """Return `gelu(gate) * up`."""
    return run_forward(gate, up, tanh)


def _fake_backward(grad, gate, up, tanh, gate_grad, up_grad):
    shapes = (gate.shape if wanted else (_NOT_COMPUTED,) for wanted in (gate_grad, up_grad))
    grad_gate, grad_up = (gate.new_empty(shape) for shape in shapes)
    return grad_gate, grad_up


@operator("triton_gated_gelu_backward", fake=_fake_backward)
def triton_gated_gelu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, tanh: bool, gate_grad: bool, up_grad: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of both projections; empty where nobody asks."""
    gradients = run_backward(grad, gate, up, tanh, gate_grad, up_grad)
    grad_gate, grad_up = (gate.new_empty(_NOT_COMPUTED) if x is None else x for x in gradients)
    return grad_gate, grad_up


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.tanh = inputs
    ctx.save_for_backward(gate, up)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[:2]
    gradients = triton_gated_gelu_backward(grad, *ctx.saved_tensors, ctx.tanh, *needs)
    return *(x if needed else None for x, needed in zip(gradients, needs, strict=True)), None


register_autograd(triton_gated_gelu, _differentiate, setup_context=_setup)


def _half(joined: Tensor) -> tuple[int, ...]:
    return (*joined.shape[:-1], joined.shape[-1] // 2)


def _fake_joined(joined, tanh):
    return joined.new_empty(_half(joined))


@operator("triton_joined_gated_gelu", fake=_fake_joined)
def triton_joined_gated_gelu(joined: Tensor, tanh: bool) -> Tensor:
    """Return `gelu(gate) * up` of [..., 2 D], the gate in front."""
    gate, up = joined.chunk(2, -1)
    return run_forward(gate, up, tanh)


def _fake_joined_backward(grad, joined, tanh, again):
    return joined.new_empty(joined.shape), joined.new_empty(_half(joined) if again else (_NOT_COMPUTED,))


@operator("triton_joined_gated_gelu_backward", fake=_fake_joined_backward)
def triton_joined_gated_gelu_backward(grad: Tensor, joined: Tensor, tanh: bool, again: bool) -> tuple[Tensor, Tensor]:
    """Return the gradient of the projection, and the forward's output again; empty where nobody asks."""
    grad_joined, out = run_joined_backward(grad, joined, tanh, again)
    return grad_joined, joined.new_empty(_NOT_COMPUTED) if out is None else out


def _setup_joined(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    joined, ctx.tanh = inputs
    ctx.save_for_backward(joined)


def _differentiate_joined(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    grad_joined, _ = triton_joined_gated_gelu_backward(grad, *ctx.saved_tensors, ctx.tanh, False)
    return grad_joined, None


register_autograd(triton_joined_gated_gelu, _differentiate_joined, setup_context=_setup_joined)
