"""The rotary kernel as a custom op: opaque to torch.compile, with a fake form and a gradient."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fat5.ops.operators import operator, register_autograd
from fat5.ops.rotary.launch import run_rotary

_NOT_COMPUTED = 0  # elements of the tensor that stands for keys that are not there


def _fake(q, k, cos, sin, key_cos, key_sin, interleaved, inverse):
    return q.new_empty(q.shape), q.new_empty(_NOT_COMPUTED) if k is None else k.new_empty(k.shape)


@operator("triton_rotary", fake=_fake)
def triton_rotary(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    key_cos: Tensor,
    key_sin: Tensor,
    interleaved: bool,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    """Return rotated queries and keys, see `launch.run_rotary`; no gradient goes to the tables."""
    out, key_out = run_rotary(q, k, cos, sin, key_cos, key_sin, interleaved, inverse)
    return out, q.new_empty(_NOT_COMPUTED) if key_out is None else key_out


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, k, *tables, interleaved, inverse = inputs
    ctx.save_for_backward(*tables)
    ctx.settings = k is not None, interleaved, inverse
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, key_grad: Tensor | None) -> tuple[Tensor | None, ...]:
    cos, sin, key_cos, key_sin = ctx.saved_tensors
    has_keys, interleaved, inverse = ctx.settings
    rest = (None,) * 6
    if not has_keys or not ctx.needs_input_grad[1]:
        key_grad = None
    if not ctx.needs_input_grad[0]:
        grad = None
    if grad is None and key_grad is None:
        return None, None, *rest
    if grad is None:  # keys alone take the queries' place
        tables = key_cos, key_sin, key_cos, key_sin
        return None, triton_rotary(key_grad, None, *tables, interleaved, not inverse)[0], *rest
    turned, key_turned = triton_rotary(grad, key_grad, cos, sin, key_cos, key_sin, interleaved, not inverse)
    return turned, None if key_grad is None else key_turned, *rest


register_autograd(triton_rotary, _differentiate, setup_context=_setup)
