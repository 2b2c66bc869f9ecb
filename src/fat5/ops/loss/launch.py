"""Launching the loss kernels: which one, strides, grids and allocation. Nothing here waits for the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from fat5.ops.launching import on_device, processors
from fat5.ops.loss import kernels
from fat5.ops.loss.paired_rows import paired_row_kernel
from fat5.ops.loss.rows import LossTerms, check_labels, label_error
from fat5.ops.loss.tiles import MAX_PAIRED_COLUMNS, Tile, is_forced, preferred_tile

_SCALE_BLOCK = 4096
_SCALE_PROGRAMS = 8  # a multiprocessor
_VECTOR_BLOCK = 4096  # labels or losses that the single program of a sum reads at a time


class RowResults(NamedTuple):
    """What the kernels store of each row, [N]; zeros on ignored rows."""

    loss: Tensor
    z_loss: Tensor
    correct: Tensor
    lse: Tensor

    @staticmethod
    def allocate(labels: Tensor) -> RowResults:
        """Return room for the results of these rows."""
        loss, z_share, lse = (torch.empty(labels.shape, dtype=torch.float32, device=labels.device) for _ in range(3))
        return RowResults(loss, z_share, torch.empty(labels.shape, dtype=torch.bool, device=labels.device), lse)

    def of(self, rows: slice) -> RowResults:
        """Return the part of some rows."""
        return RowResults(*(part[rows] for part in self))


def count_labels(labels: Tensor, vocab_size: int, ignore_index: int) -> Tensor:
    """Return the number of labels that are not ignored, int64 [1].

    A label out of range is an error as in `rows.check_labels`.
    """
    if labels.device.type == "cpu":
        check_labels(labels, vocab_size, ignore_index)
    count = torch.empty(1, dtype=torch.int64, device=labels.device)
    valid = torch.empty(1, dtype=torch.bool, device=labels.device)
    with on_device(labels):
        kernels.labels_kernel[(1,)](
            labels, count, valid.view(torch.int8), len(labels), vocab_size, ignore_index,
            BLOCK=_VECTOR_BLOCK, num_warps=8,
        )  # fmt: skip
    torch._assert_async(valid, label_error(vocab_size, ignore_index))
    return count


def store_losses(
    logits: Tensor,
    labels: Tensor,
    terms: LossTerms,
    results: RowResults,
    *,
    gradient: Tensor | None = None,
    mean_over: Tensor | None = None,
) -> None:
    """Store the results of rows of logits [N, V], and the gradient of their sum or mean.

    Args:
        logits: Columns are neighbours in memory; rows may lie anywhere.
        labels: int64 [N].
        terms: Which loss.
        results: Where the results go.
        gradient: [N, V], where the gradient goes: `logits` themselves, or none of their memory; None for no gradient.
        mean_over: Number of rows that the mean is over, int64 [1]; None for the sum.
    """
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    target = logits if gradient is None else gradient
    paired = _paired(logits) and not is_forced("blocks")
    tile = preferred_tile("pairs" if paired else "blocks", vocab_size)
    arguments = {
        "G": target,
        "Labels": labels,
        "Count": mean_over,
        "Loss": results.loss,
        "ZLoss": results.z_loss,
        "Correct": results.correct.view(torch.int8),
        "LSE": results.lse,
        "g_row": target.stride(0),
        "vocab_size": vocab_size,
        "ignore_index": terms.ignore_index,
        "smoothing": float(terms.label_smoothing),
        "z_weight": float(terms.z_loss),
        "BLOCK": tile.columns,
        "EVEN": vocab_size % tile.columns == 0,
        "SMOOTHED": terms.label_smoothing > 0,
        "GRADIENT": gradient is not None,
        "MEAN": mean_over is not None,
        **tile.options(),
    }
    with on_device(logits):
        if paired:
            pairs = logits.view(torch.int32)
            programs = min(num_rows, processors(logits.device) * tile.programs()) if tile.stages > 1 else num_rows
            paired_row_kernel[(programs,)](
                X=pairs, x_row=pairs.stride(0), num_rows=num_rows, PREFETCH=tile.stages > 1, ASM=_assembly(logits),
                **arguments,
            )  # fmt: skip
        else:
            kernels.row_kernel[(num_rows,)](X=logits, x_row=logits.stride(0), STAGES=tile.stages, **arguments)


def store_gradient(
    grad: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, terms: LossTerms, gradient: Tensor
) -> None:
    """Store the gradient by rows of logits [N, V] for the gradients `grad` [N] of their losses.

    `gradient` may be the logits themselves.
    """
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    tile: Tile = preferred_tile("gradient", vocab_size)
    with on_device(logits):
        kernels.gradient_kernel[(num_rows, triton.cdiv(vocab_size, tile.columns))](
            X=logits, G=gradient, Labels=labels, LSE=lse, Grad=grad,
            x_row=logits.stride(0), g_row=gradient.stride(0), grad_row=grad.stride(0), vocab_size=vocab_size,
            ignore_index=terms.ignore_index, smoothing=float(terms.label_smoothing), z_weight=float(terms.z_loss),
            BLOCK=tile.columns, EVEN=vocab_size % tile.columns == 0, **tile.options(),
        )  # fmt: skip


def multiply_(gradient: Tensor, grad: Tensor) -> None:
    """Multiply a contiguous tensor by a scalar on its device, in place; by 1 costs a launch alone."""
    if gradient.numel() == 0:
        return
    programs = min(triton.cdiv(gradient.numel(), _SCALE_BLOCK), _SCALE_PROGRAMS * processors(gradient.device))
    with on_device(gradient):
        kernels.scale_kernel[(programs,)](gradient, grad, gradient.numel(), BLOCK=_SCALE_BLOCK)


def scaled(grad: Tensor, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous tensor times a scalar on its device, rounded once to a type."""
    out = torch.empty_like(gradient, dtype=dtype)
    if out.numel():
        with on_device(gradient):
            kernels.scaled_kernel[(triton.cdiv(out.numel(), _SCALE_BLOCK),)](
                gradient, out, grad, out.numel(), BLOCK=_SCALE_BLOCK, num_warps=8
            )
    return out


def sums(results: RowResults, mean_over: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the sums of loss and z share over the rows, float32 scalars, or their means over `mean_over` rows."""
    loss, z_share = (torch.empty((), dtype=torch.float32, device=results.loss.device) for _ in range(2))
    with on_device(loss):
        kernels.sums_kernel[(1,)](
            results.loss, results.z_loss, mean_over, loss, z_share, len(results.loss), MEAN=mean_over is not None,
            BLOCK=_VECTOR_BLOCK, num_warps=8,
        )  # fmt: skip
    return loss, z_share


def neighbours(logits: Tensor) -> Tensor:
    """Return the logits with the columns of a row side by side, copied only where they are not."""
    return logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()


def _paired(logits: Tensor) -> bool:
    """Whether each row can be read as pairs of bf16, and be held in the registers of one program."""
    vocab_size = logits.shape[1]
    aligned = logits.data_ptr() % 4 == 0 and logits.storage_offset() % 2 == 0
    even = vocab_size % 2 == 0 and logits.stride(0) % 2 == 0
    return logits.dtype == torch.bfloat16 and vocab_size <= MAX_PAIRED_COLUMNS and aligned and even


def _assembly(x: Tensor) -> bool:
    return x.is_cuda and not triton.knobs.runtime.interpret and torch.version.hip is None
