"""What an implementation of attention is, and how the gradients of its bias are brought to one form."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.attention.reference import sum_by_bucket, sums_by_distance
from benchmarks.attention.workload import Inputs, Workload, buckets_by_distance

BiasGradient = Callable[[Tensor, tuple[int, ...]], Tensor]


@dataclass(frozen=True)
class Run:
    """An implementation with inputs in the layout of its liking.

    Attributes:
        forward: Returns the output, with its graph.
        leaves: q, k, v, and the bias where it takes a gradient.
        grad_out: Gradient of the output, in its layout.
        standard: Brings an output, or a gradient of q, k or v, to [B, H, L, D].
        bias_gradient: Brings the gradient of the last leaf to what `reference.Answer` has, for some heads; None where
            the bias takes no gradient.
        held: Tensors beyond q, k, v and the table that it holds, such as a materialised bias.
        context: Entered around each backward.
    """

    forward: Callable[[], Tensor]
    leaves: list[Tensor]
    grad_out: Tensor
    standard: Callable[[Tensor], Tensor]
    bias_gradient: BiasGradient | None = None
    held: tuple[Tensor, ...] = ()
    context: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention.

    Attributes:
        name: As the tables show it.
        prepare: Makes a run.
        has_bias: It adds the bias.
        unavailable: Returns why it cannot run a workload on a device, or None.
        own: It is FAT5's.
    """

    name: str
    prepare: Callable[[Workload, Inputs], Run]
    has_bias: bool
    unavailable: Callable[[Workload, torch.device], str | None]
    own: bool = False


def heads_of_table(grad: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Bring the gradient of T5's table to the standard form: [32, heads]."""
    return grad[:, list(heads)]


def heads_of_dense(grad: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Bring the gradient of a dense bias to the standard form: [1 or B, heads, L, L]."""
    return grad[:, list(heads)]


def buckets_of_distances(workload: Workload) -> BiasGradient:
    """Bring the gradient [H, 2R + 1] of a table by distance to that of T5's table."""

    def gradient(grad: Tensor, heads: tuple[int, ...]) -> Tensor:
        buckets = buckets_by_distance(grad.shape[1] // 2 + 1, workload.causal, grad.device)
        return sum_by_bucket(grad[list(heads)].double(), buckets)

    return gradient


def buckets_of_materialised(workload: Workload) -> BiasGradient:
    """Bring the gradient [1 or B, H, L, L] of a materialised table to that of T5's table."""

    def gradient(grad: Tensor, heads: tuple[int, ...]) -> Tensor:
        by_row = [torch.stack([sums_by_distance(row[head]) for head in heads]) for row in grad]
        buckets = buckets_by_distance(workload.length, workload.causal, grad.device)
        return sum_by_bucket(torch.stack(by_row).sum(0), buckets)

    return gradient
