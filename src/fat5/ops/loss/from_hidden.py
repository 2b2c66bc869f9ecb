"""Torch backend of linear_cross_entropy: the logits exist one block of rows at a time and are never kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fat5.ops.loss.rows import (
    LossTerms,
    accumulation_dtype,
    check_labels,
    gradients_,
    losses_,
    row_blocks,
    rows_per_block,
)


class _Block(NamedTuple):
    """The rows of one block: where they lie, their hidden states, labels and logits."""

    rows: slice | Tensor
    hidden: Tensor  # [R, D]
    targets: Tensor  # [R]
    logits: Tensor  # [R, V], float32 or float64
    narrow: Tensor  # [R, V], the type of hidden; the same memory as logits where that is the same type


def _blocks(hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, chunk_bytes: int) -> Iterator[_Block]:
    size = rows_per_block(len(labels), len(weight), hidden.dtype, chunk_bytes)
    wide = accumulation_dtype(hidden.dtype)
    narrow_buffer = hidden.new_empty(size, len(weight))
    wide_buffer = narrow_buffer if wide == hidden.dtype else hidden.new_empty(size, len(weight), dtype=wide)
    for rows in row_blocks(labels, ignore_index, size):
        targets = labels[rows]
        states = hidden[rows]
        if isinstance(rows, slice):  # ignored rows may have come along: a NaN in one must not reach the gradients
            states = states.masked_fill((targets == ignore_index)[:, None], 0)
        narrow, logits = narrow_buffer[: len(targets)], wide_buffer[: len(targets)]
        torch.mm(states, weight.t(), out=narrow)
        if wide != hidden.dtype:
            logits.copy_(narrow)
        yield _Block(rows, states, targets, logits, narrow)


class _Gradients:
    """The gradients by hidden states and weight, added up block by block; one that is not wanted stays empty."""

    def __init__(self, hidden: Tensor, weight: Tensor, hidden_gradient: bool, weight_gradient: bool) -> None:
        wide = accumulation_dtype(weight.dtype)
        self.hidden = hidden.new_zeros(hidden.shape if hidden_gradient else 0)
        self.weight = weight.new_zeros(weight.shape if weight_gradient else 0, dtype=wide)
        self.wanted = hidden_gradient or weight_gradient

    def add(self, block: _Block, weight: Tensor) -> None:
        """Add a block whose `logits` hold the gradient by the logits."""
        same = block.narrow.dtype == block.logits.dtype
        if not same:
            block.narrow.copy_(block.logits)
        if self.hidden.numel():
            self.hidden[block.rows] = block.narrow @ weight
        if not self.weight.numel():
            return
        if not same and block.hidden.is_cuda:
            self.weight += torch.mm(block.narrow.t(), block.hidden, out_dtype=self.weight.dtype)
        else:
            self.weight.addmm_(block.logits.t(), block.hidden.to(self.weight.dtype))


@torch.library.custom_op("fat5::linear_cross_entropy_sum", mutates_args=())
def linear_cross_entropy_sum(
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
    """Return summed loss, summed z share, correctness [N] and the gradients of the summed loss that are asked for.

    The gradient by the weight comes in the accumulation type, so that it is rounded once, after the incoming gradient.
    """
    terms = LossTerms(ignore_index, label_smoothing, z_loss)
    check_labels(labels, len(weight), ignore_index)
    loss, z_share = (hidden.new_zeros((), dtype=accumulation_dtype(hidden.dtype)) for _ in range(2))
    correct = labels.new_zeros(labels.shape, dtype=torch.bool)
    with torch.autocast(hidden.device.type, enabled=False):
        gradients = _Gradients(hidden, weight, hidden_gradient, weight_gradient)
        for block in _blocks(hidden, weight, labels, ignore_index, chunk_bytes):
            result = losses_(block.logits, block.targets, terms)
            loss += result.loss.sum()
            z_share += result.z_loss.sum()
            correct[block.rows] = result.correct
            if gradients.wanted:
                gradients_(block.logits, block.targets, terms, result.lse, result.total, 1.0)
                gradients.add(block, weight)
    return loss, z_share, correct, gradients.hidden, gradients.weight


@linear_cross_entropy_sum.register_fake
def _(
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
    wide = accumulation_dtype(hidden.dtype)
    return (
        hidden.new_empty((), dtype=wide),
        hidden.new_empty((), dtype=wide),
        labels.new_empty(labels.shape, dtype=torch.bool),
        hidden.new_empty(hidden.shape if hidden_gradient else 0),
        weight.new_empty(weight.shape if weight_gradient else 0, dtype=wide),
    )


@torch.library.custom_op("fat5::linear_cross_entropy_sum_backward", mutates_args=())
def linear_cross_entropy_sum_backward(
    grad: Tensor, hidden_gradient: Tensor, weight_gradient: Tensor, weight_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Multiply the gradients that the forward made by the incoming one, a scalar, and round once.

    An operator of its own without a backward: asking for second derivatives is an error and not a wrong number.
    """
    scaled = (
        hidden_gradient.to(grad.dtype).mul_(grad) if hidden_gradient.dtype != grad.dtype else hidden_gradient * grad
    )
    return scaled.to(hidden_gradient.dtype), (weight_gradient * grad).to(weight_dtype)


@linear_cross_entropy_sum_backward.register_fake
def _(
    grad: Tensor, hidden_gradient: Tensor, weight_gradient: Tensor, weight_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden_gradient), torch.empty_like(weight_gradient, dtype=weight_dtype)


def _sum_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.weight_dtype = inputs[1].dtype
    ctx.gradients_wanted = inputs[-2:]
    ctx.save_for_backward(output[3], output[4])


def _sum_backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    by_hidden, by_weight = linear_cross_entropy_sum_backward(grad, *ctx.saved_tensors, ctx.weight_dtype)
    hidden_wanted, weight_wanted = ctx.gradients_wanted
    return by_hidden if hidden_wanted else None, by_weight if weight_wanted else None, *(None,) * 7


linear_cross_entropy_sum.register_autograd(_sum_backward, setup_context=_sum_setup_context)


@torch.library.custom_op("fat5::linear_cross_entropy_rows", mutates_args=())
def linear_cross_entropy_rows(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    chunk_bytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return loss, z share, correctness and log-sum-exp [N]; zeros on ignored rows."""
    terms = LossTerms(ignore_index, label_smoothing, z_loss)
    check_labels(labels, len(weight), ignore_index)
    loss, z_share, lse = (hidden.new_zeros(labels.shape, dtype=accumulation_dtype(hidden.dtype)) for _ in range(3))
    correct = labels.new_zeros(labels.shape, dtype=torch.bool)
    with torch.autocast(hidden.device.type, enabled=False):
        for block in _blocks(hidden, weight, labels, ignore_index, chunk_bytes):
            result, rows = losses_(block.logits, block.targets, terms), block.rows
            loss[rows], z_share[rows], correct[rows], lse[rows] = result[:4]
    return loss, z_share, correct, lse


@linear_cross_entropy_rows.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    chunk_bytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss, z_share, lse = (hidden.new_empty(labels.shape, dtype=accumulation_dtype(hidden.dtype)) for _ in range(3))
    return loss, z_share, labels.new_empty(labels.shape, dtype=torch.bool), lse


@torch.library.custom_op("fat5::linear_cross_entropy_rows_backward", mutates_args=())
def linear_cross_entropy_rows_backward(
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
    """Recompute the logits and return the gradients by hidden states and weight for the row gradients `grad` [N]."""
    terms = LossTerms(ignore_index, label_smoothing, z_loss)
    with torch.autocast(hidden.device.type, enabled=False):
        gradients = _Gradients(hidden, weight, hidden_gradient, weight_gradient)
        for block in _blocks(hidden, weight, labels, ignore_index, chunk_bytes):
            row_lse = lse[block.rows]
            block.logits.sub_(row_lse[:, None]).exp_()
            gradients_(block.logits, block.targets, terms, row_lse, 1.0, grad[block.rows])
            gradients.add(block, weight)
    return gradients.hidden, gradients.weight.to(weight.dtype)


@linear_cross_entropy_rows_backward.register_fake
def _(
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
    return (
        hidden.new_empty(hidden.shape if hidden_gradient else 0),
        weight.new_empty(weight.shape if weight_gradient else 0),
    )


def _rows_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, labels, *ctx.settings = inputs
    ctx.save_for_backward(hidden, weight, labels, output[3])


def _rows_backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    wanted = ctx.needs_input_grad[:2]
    by_hidden, by_weight = linear_cross_entropy_rows_backward(grad, *ctx.saved_tensors, *ctx.settings, *wanted)
    return by_hidden if wanted[0] else None, by_weight if wanted[1] else None, *(None,) * 5


linear_cross_entropy_rows.register_autograd(_rows_backward, setup_context=_rows_setup_context)
