"""The losses as custom ops, two families a backend: opaque to torch.compile, with a fake form and a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fat5.ops.loss.rows import LossTerms, accumulation_dtype

Rows = tuple[Tensor, Tensor, Tensor, Tensor]


def define_logits_ops(
    name: str,
    run_rows: Callable[[Tensor, Tensor, LossTerms, int], Rows],
    run_rows_backward: Callable[[Tensor, Tensor, Tensor, Tensor, LossTerms, int], Tensor],
) -> tuple[Any, Any]:
    """Register `fat5::{name}_cross_entropy_rows` and its backward, and return both.

    Args:
        name: Name of the backend.
        run_rows: Maps logits [N, V], labels [N], terms and chunk_bytes to loss, z share, correctness and log-sum-exp
            [N], zeros on ignored rows.
        run_rows_backward: Maps the gradients of the losses [N], then logits, labels, log-sum-exp, terms and chunk_bytes
            to the gradient by the logits [N, V] in their type.
    """

    @torch.library.custom_op(f"fat5::{name}_cross_entropy_rows", mutates_args=())
    def rows(
        logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, chunk_bytes: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return run_rows(logits, labels, LossTerms(ignore_index, label_smoothing, z_loss), chunk_bytes)

    @rows.register_fake
    def _(logits, labels, *settings):
        return _fake_rows(logits, labels)

    @torch.library.custom_op(f"fat5::{name}_cross_entropy_rows_backward", mutates_args=())
    def backward(
        grad: Tensor,
        logits: Tensor,
        labels: Tensor,
        lse: Tensor,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
        chunk_bytes: int,
    ) -> Tensor:
        terms = LossTerms(ignore_index, label_smoothing, z_loss)
        return run_rows_backward(grad, logits, labels, lse, terms, chunk_bytes)

    @backward.register_fake
    def _(grad, logits, *rest):
        return logits.new_empty(logits.shape)

    def setup_context(ctx, inputs, output):
        logits, labels, *ctx.settings = inputs
        ctx.save_for_backward(logits, labels, output[3])

    def differentiate(ctx, grad, *_):
        return backward(grad, *ctx.saved_tensors, *ctx.settings), *(None,) * 5

    rows.register_autograd(differentiate, setup_context=setup_context)
    return rows, backward


class HiddenOps(NamedTuple):
    """The losses from hidden states of one backend."""

    sum: Any
    rows: Any
    rows_backward: Any
    scale: Any


def define_hidden_ops(
    name: str,
    run_sum: Callable[
        [Tensor, Tensor, Tensor, LossTerms, int, bool, bool], tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    ],
    run_rows: Callable[[Tensor, Tensor, Tensor, LossTerms, int], Rows],
    run_rows_backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, LossTerms, int, bool, bool], tuple[Tensor, Tensor]
    ],
    run_scale: Callable[[Tensor, Tensor, torch.dtype], Tensor],
) -> HiddenOps:
    """Register `fat5::{name}_linear_cross_entropy_sum`, `_rows`, `_rows_backward` and `_scale`, and return them.

    Autocast is off inside: the operators run in the type of their inputs.

    Args:
        name: Name of the backend.
        run_sum: Maps hidden [N, D], weight [V, D], labels [N], terms, chunk_bytes and which gradients are wanted, by
            hidden states and by weight, to summed loss, summed z share, correctness [N] and these gradients of the
            summed loss; that by the weight in the accumulation type; empty ones that are not wanted.
        run_rows: Maps hidden, weight, labels, terms and chunk_bytes to what `define_logits_ops` says.
        run_rows_backward: Maps the gradients of the losses [N], then hidden, weight, labels, log-sum-exp, terms,
            chunk_bytes and which gradients are wanted to these, that by the weight in the accumulation type.
        run_scale: Maps a scalar, a tensor and a type to their product in this type, rounded once.
    """

    @torch.library.custom_op(f"fat5::{name}_linear_cross_entropy_scale", mutates_args=())
    def scale(
        grad: Tensor, hidden_gradient: Tensor, weight_gradient: Tensor, weight_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        # An operator of its own without a backward: asking for second derivatives is an error and not a wrong number.
        by_hidden = run_scale(grad, hidden_gradient, hidden_gradient.dtype)
        return by_hidden, run_scale(grad, weight_gradient, weight_dtype)

    @scale.register_fake
    def _(grad, hidden_gradient, weight_gradient, weight_dtype):
        return torch.empty_like(hidden_gradient), torch.empty_like(weight_gradient, dtype=weight_dtype)

    @torch.library.custom_op(f"fat5::{name}_linear_cross_entropy_sum", mutates_args=())
    def whole(
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
        chunk_bytes: int,
        hidden_gradient: bool,
        weight_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        terms = LossTerms(ignore_index, label_smoothing, z_loss)
        with torch.autocast(hidden.device.type, enabled=False):
            return run_sum(hidden, weight, labels, terms, chunk_bytes, hidden_gradient, weight_gradient)

    @whole.register_fake
    def _(hidden, weight, labels, *settings):
        wide = accumulation_dtype(hidden.dtype)
        loss, z_share = (hidden.new_empty((), dtype=wide) for _ in range(2))
        correct = labels.new_empty(labels.shape, dtype=torch.bool)
        by_hidden, by_weight = _fake_gradients(hidden, weight, *settings[-2:])
        return loss, z_share, correct, by_hidden, by_weight.to(wide)

    def setup_sum(ctx, inputs, output):
        ctx.set_materialize_grads(False)  # zeros for the gradients among the outputs would be as large as they are
        ctx.weight_dtype = inputs[1].dtype
        ctx.gradients_wanted = inputs[-2:]
        ctx.save_for_backward(output[3], output[4])

    def differentiate_sum(ctx, grad, *_):
        if grad is None:
            return (None,) * 9
        by_hidden, by_weight = scale(grad, *ctx.saved_tensors, ctx.weight_dtype)
        hidden_wanted, weight_wanted = ctx.gradients_wanted
        return by_hidden if hidden_wanted else None, by_weight if weight_wanted else None, *(None,) * 7

    whole.register_autograd(differentiate_sum, setup_context=setup_sum)

    @torch.library.custom_op(f"fat5::{name}_linear_cross_entropy_rows", mutates_args=())
    def rows(
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
        chunk_bytes: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with torch.autocast(hidden.device.type, enabled=False):
            return run_rows(hidden, weight, labels, LossTerms(ignore_index, label_smoothing, z_loss), chunk_bytes)

    @rows.register_fake
    def _(hidden, weight, labels, *settings):
        return _fake_rows(hidden, labels)

    @torch.library.custom_op(f"fat5::{name}_linear_cross_entropy_rows_backward", mutates_args=())
    def rows_backward(
        grad: Tensor,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        lse: Tensor,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
        chunk_bytes: int,
        hidden_gradient: bool,
        weight_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        terms = LossTerms(ignore_index, label_smoothing, z_loss)
        wanted = hidden_gradient, weight_gradient
        with torch.autocast(hidden.device.type, enabled=False):
            by_hidden, by_weight = run_rows_backward(grad, hidden, weight, labels, lse, terms, chunk_bytes, *wanted)
        return by_hidden, by_weight.to(weight.dtype)

    @rows_backward.register_fake
    def _(grad, hidden, weight, *rest):
        return _fake_gradients(hidden, weight, *rest[-2:])

    def setup_rows(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        hidden, weight, labels, *ctx.settings = inputs
        ctx.save_for_backward(hidden, weight, labels, output[3])

    def differentiate_rows(ctx, grad, *_):
        if grad is None:
            return (None,) * 7
        wanted = ctx.needs_input_grad[:2]
        by_hidden, by_weight = rows_backward(grad, *ctx.saved_tensors, *ctx.settings, *wanted)
        return by_hidden if wanted[0] else None, by_weight if wanted[1] else None, *(None,) * 5

    rows.register_autograd(differentiate_rows, setup_context=setup_rows)
    return HiddenOps(whole, rows, rows_backward, scale)


def _fake_rows(like: Tensor, labels: Tensor) -> Rows:
    loss, z_share, lse = (like.new_empty(labels.shape, dtype=accumulation_dtype(like.dtype)) for _ in range(3))
    return loss, z_share, labels.new_empty(labels.shape, dtype=torch.bool), lse


def _fake_gradients(
    hidden: Tensor, weight: Tensor, hidden_gradient: bool, weight_gradient: bool
) -> tuple[Tensor, Tensor]:
    return (
        hidden.new_empty(hidden.shape if hidden_gradient else 0),
        weight.new_empty(weight.shape if weight_gradient else 0),
    )
