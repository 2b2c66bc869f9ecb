"""Loss and gradient in one pass over the logits: for a loss that is reduced to a scalar, in eager mode.

The forward stores the gradient of the reduced loss. The backward multiplies it by the incoming gradient where that is
not 1, which only the device looks at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fat5.ops.loss.launch import RowResults, count_labels, multiply_, neighbours, store_losses, sums
from fat5.ops.loss.rows import LossTerms
from fat5.ops.loss.triton_backend import rows_backward_op


@torch.library.custom_op("fat5::triton_cross_entropy_with_gradient", mutates_args=("gradient",))
def cross_entropy_with_gradient(
    logits: Tensor,
    labels: Tensor,
    gradient: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    mean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return reduced loss and z share, correctness and log-sum-exp [N] and the number of kept rows [1].

    Also store the gradient of the reduced loss by the logits [N, V] in `gradient`, which may be the same memory.
    """
    terms = LossTerms(ignore_index, label_smoothing, z_loss)
    count = count_labels(labels, logits.shape[1], ignore_index)
    results = RowResults.allocate(labels)
    mean_over = count if mean else None
    store_losses(logits, labels, terms, results, gradient=gradient, mean_over=mean_over)
    return *sums(results, mean_over), results.correct, results.lse, count


@cross_entropy_with_gradient.register_fake
def _(logits, labels, gradient, *settings):
    loss, z_share = (logits.new_empty((), dtype=torch.float32) for _ in range(2))
    lse = logits.new_empty(labels.shape, dtype=torch.float32)
    return loss, z_share, labels.new_empty(labels.shape, dtype=torch.bool), lse, labels.new_empty(1)


@torch.library.custom_op("fat5::triton_multiply_", mutates_args=("gradient",))
def multiply_gradient_(gradient: Tensor, grad: Tensor) -> None:
    """Multiply a contiguous tensor by a scalar on its device, in place; by 1 costs a launch alone."""
    multiply_(gradient, grad)


@multiply_gradient_.register_fake
def _(gradient, grad):
    return None


class _LossWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, terms: LossTerms, mean: bool, overwrite: bool) -> Any:
        ctx.set_materialize_grads(False)
        plain = neighbours(logits.detach())
        overwrite = overwrite and logits.is_contiguous()
        gradient = plain if overwrite else torch.empty(plain.shape, dtype=plain.dtype, device=plain.device)
        loss, z_share, correct, lse, count = cross_entropy_with_gradient(plain, labels, gradient, *terms, mean)
        ctx.mark_non_differentiable(z_share, correct, count)
        ctx.terms, ctx.mean, ctx.overwritten = terms, mean, overwrite
        ctx.gradient = gradient
        ctx.save_for_backward(*(() if overwrite else (logits, labels, lse, count)))
        return loss, z_share, correct, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
        if grad is None:
            return (None,) * 5
        gradient = ctx.gradient
        if gradient is not None and not torch.is_grad_enabled():
            ctx.gradient = None  # it belongs to the caller from here on
            multiply_gradient_(gradient, grad)
            return gradient, None, None, None, None
        if ctx.overwritten:
            raise RuntimeError(
                "cross_entropy: a second backward pass, or one with create_graph=True, needs the logits, which were "
                "overwritten; expected overwrite_logits=False where the graph is used twice"
            )
        # An operator without a backward: asking for second derivatives is an error and not a wrong number.
        logits, labels, lse, count = ctx.saved_tensors
        rows = (grad / count.clamp(min=1) if ctx.mean else grad).expand(len(labels))
        gradient = rows_backward_op(rows, logits, labels, lse, *ctx.terms, 0)
        return gradient, None, None, None, None


def reduced_cross_entropy(
    logits: Tensor, labels: Tensor, terms: LossTerms, mean: bool, overwrite_logits: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return loss and z share, summed or averaged, correctness [N] and the number of kept rows [1].

    Args:
        logits: [N, V], on a GPU.
        labels: int64 [N].
        terms: Which loss.
        mean: Over the kept rows; otherwise the sum.
        overwrite_logits: Let the gradient take the memory of the logits if it can.
    """
    return _LossWithGradient.apply(logits, labels, terms, mean, overwrite_logits)
