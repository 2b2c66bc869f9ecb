"""The correctness gate: loss and gradients of the timed shape against float64, a block of rows at a time."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.loss.workload import IGNORE_INDEX, Inputs, Workload
from benchmarks.subject import GateError

FORWARD_FACTOR, GRADIENT_FACTOR = 2.0, 3.0
_LARGEST_LIMIT = 0.1  # a limit near 1 would let zeros pass
_LEAST_LOSS_LIMIT = 1e-4  # the loss of many tokens may come out nearly exact in plain PyTorch, by chance
_BLOCK_ELEMENTS = 2**26
_CHECKED_ROWS = 512


class Answer(NamedTuple):
    """A mean loss and its gradients: those by rows for some rows alone, that by the weight whole."""

    loss: Tensor
    by_rows: Tensor
    by_weight: Tensor | None


def formula(logits: Tensor, labels: Tensor, z_loss: float) -> Tensor:
    """Return the mean loss in plain PyTorch: a float32 copy of the logits, as a training loop would write it."""
    wide = logits.float() if logits.dtype != torch.float64 else logits
    kept = labels != IGNORE_INDEX
    lse = torch.logsumexp(wide, dim=-1)
    z_share = (lse.square() * kept).sum() / kept.sum()
    return F.cross_entropy(wide, labels, ignore_index=IGNORE_INDEX) + z_loss * z_share


class Gate:
    """Compares an implementation with float64 at the shape that is timed.

    The relative error `norm(x - truth) / norm(truth)` may be 2 times that of plain PyTorch in the same type for the
    loss, and 3 times for gradients; 10 % at most in any case. NaN never passes, wherever it stands.
    """

    def __init__(self, workload: Workload, inputs: Inputs) -> None:
        self._workload, self._inputs = workload, inputs
        step = max(1, workload.rows // _CHECKED_ROWS)
        self.rows = torch.arange(0, workload.rows, step, device=inputs.labels.device)

    @functools.cached_property
    def _answers(self) -> tuple[Answer, Answer]:
        exact = answer(self._workload, self._inputs, torch.float64, self.rows)
        return exact, answer(self._workload, self._inputs, self._inputs.leaves[0].dtype, self.rows)

    def check(self, loss: Tensor, grads: tuple[Tensor, ...]) -> float:
        """Return the share of the tolerance that the worst error takes.

        Args:
            loss: The mean.
            grads: Of the leaves, whole.

        Raises:
            GateError: An error is beyond its limit, or something is not finite.
        """
        got = Answer(loss.detach(), grads[0][self.rows], grads[1] if len(grads) > 1 else None)
        for name, grad in zip(("by_rows", "by_weight"), grads, strict=False):
            if not grad.isfinite().all():
                raise GateError(f"the gradient {name} is not finite everywhere")
        exact, plain = self._answers
        worst = 0.0
        for name, found, truth, simple in zip(Answer._fields, got, exact, plain, strict=True):
            if truth is None:
                continue
            if found is None or found.shape != truth.shape:
                shape = None if found is None else list(found.shape)
                raise GateError(f"{name} has shape {shape}, expected {list(truth.shape)}")
            factor, least = (FORWARD_FACTOR, _LEAST_LOSS_LIMIT) if name == "loss" else (GRADIENT_FACTOR, 0.0)
            limit = min(max(factor * _relative_error(simple, truth), least), _LARGEST_LIMIT)
            error = _relative_error(found, truth)
            if not error <= limit:
                raise GateError(f"{name} is off by {error:.2e} of its norm, more than the {limit:.2e} allowed")
            worst = max(worst, error / limit)
        return worst


def answer(workload: Workload, inputs: Inputs, dtype: torch.dtype, rows: Tensor) -> Answer:
    """Compute an answer in a type; what is added up over blocks is added in float64."""
    leaves = [leaf.detach().to(dtype) for leaf in inputs.leaves]
    count = (inputs.labels != IGNORE_INDEX).sum()
    loss = torch.zeros((), dtype=torch.float64, device=count.device)
    by_rows = torch.empty(leaves[0].shape, dtype=dtype, device=count.device)
    by_weight = torch.zeros_like(inputs.leaves[1], dtype=torch.float64) if workload.width else None
    size = max(1, _BLOCK_ELEMENTS // workload.vocab)
    for start in range(0, workload.rows, size):
        block = slice(start, start + size)
        labels = inputs.labels[block]
        logits = leaves[0][block] @ leaves[1].T if workload.width else leaves[0][block]
        logits = logits.detach().requires_grad_()
        share = (labels != IGNORE_INDEX).sum() / count
        if share == 0:
            by_rows[block] = 0
            continue
        part = formula(logits, labels, workload.z_loss) * share
        (by_logits,) = torch.autograd.grad(part, logits)
        loss += part.detach()
        by_rows[block] = by_logits @ leaves[1] if workload.width else by_logits
        if by_weight is not None:
            by_weight += by_logits.T @ leaves[0][block]
    by_weight = by_weight if by_weight is None or dtype == torch.float64 else by_weight.to(dtype)
    return Answer(loss, by_rows[rows], by_weight)


def _relative_error(x: Tensor, truth: Tensor) -> float:
    return float((x.double() - truth).norm() / truth.norm())
