"""Attention and its gradients as the formulas say, a block of queries at a time.

In float64 it is the truth of the gate; in the type that is measured it is what plain PyTorch makes of the same
formulas, whose error is the unit of the tolerance. It shares no code with the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.attention.workload import NUM_BUCKETS, Inputs, Workload, buckets_by_distance

_BLOCK_ELEMENTS = 2**25  # scores of a block: 256 MB in float64


@dataclass(frozen=True)
class Answer:
    """Outputs and gradients of some heads.

    Attributes:
        out: [B, heads, L, D], 0 at padding; the next three likewise.
        grad_q: Gradient of q.
        grad_k: Gradient of k.
        grad_v: Gradient of v.
        grad_bias: Of the table, [32, heads]; of a dense bias, [1 or B, heads, L, L]; None without a bias.
    """

    out: Tensor
    grad_q: Tensor
    grad_k: Tensor
    grad_v: Tensor
    grad_bias: Tensor | None


def attention_answer(
    workload: Workload, inputs: Inputs, heads: tuple[int, ...], dtype: torch.dtype, *, with_bias: bool
) -> Answer:
    """Compute `softmax(q k^T + bias) v` and its gradients in `dtype`.

    Sums over blocks, rows of the batch and distances are in float64 where dtype is, else in float32: plain PyTorch sums
    in float32 inside a product of matrices too.
    """
    device, wide = inputs.q.device, torch.promote_types(dtype, torch.float32)
    shape = (workload.batch, len(heads), workload.length, workload.head_dim)
    out, grad_q, grad_k, grad_v = (torch.zeros(shape, dtype=wide, device=device) for _ in range(4))
    bias = _bias(workload, inputs, wide) if with_bias else None
    for row, length in enumerate(workload.real_lengths):
        for place, head in enumerate(heads):
            q, k, v, g = (x[row, head, :length].to(dtype) for x in (inputs.q, inputs.k, inputs.v, inputs.grad_out))
            block = max(16, _BLOCK_ELEMENTS // max(length, 1))
            for start in range(0, length, block):
                rows = slice(start, min(start + block, length))
                keys = slice(0, rows.stop if workload.causal else length)
                scores = q[rows] @ k[keys].T
                if bias is not None:
                    scores = scores + bias.block(row, head, rows, keys).to(dtype)
                if workload.causal:
                    ahead = torch.ones_like(scores, dtype=torch.bool).triu_(rows.start + 1)
                    scores = scores.masked_fill(ahead, -torch.inf)
                weights = scores.softmax(-1)
                grad_weights = g[rows] @ v[keys].T
                share = (weights.to(wide) * grad_weights.to(wide)).sum(-1, keepdim=True)
                grad_scores = (weights.to(wide) * (grad_weights.to(wide) - share)).to(dtype)
                out[row, place, rows] = (weights @ v[keys]).to(wide)
                grad_q[row, place, rows] = (grad_scores @ k[keys]).to(wide)
                grad_k[row, place, keys] += (grad_scores.T @ q[rows]).to(wide)
                grad_v[row, place, keys] += (weights.T @ g[rows]).to(wide)
                if bias is not None:
                    bias.add(row, head, rows, keys, grad_scores.to(wide))
    grad_bias = None if bias is None else bias.gradient(heads)
    if inputs.dense is not None and grad_bias is not None:
        grad_bias = grad_bias.to(dtype)  # a table's gradient stays in its own type
    return Answer(*(x.to(dtype) for x in (out, grad_q, grad_k, grad_v)), grad_bias)


class _TableBias:
    """T5's table: values by distance, gradients summed by distance and then by bucket."""

    def __init__(self, workload: Workload, inputs: Inputs, dtype: torch.dtype) -> None:
        self._length = workload.length
        self._buckets = buckets_by_distance(workload.length, workload.causal, inputs.q.device)
        self._values = inputs.table.to(dtype)[self._buckets].T.contiguous()  # [H, 2L - 1]
        self._grad = torch.zeros_like(self._values)

    def block(self, row: int, head: int, rows: slice, keys: slice) -> Tensor:
        windows = self._values[head].unfold(0, keys.stop, 1)  # window s begins at distance s - (L - 1)
        return windows[self._length - rows.stop : self._length - rows.start].flip(0)

    def add(self, row: int, head: int, rows: slice, keys: slice, grad_scores: Tensor) -> None:
        _add_by_distance(self._grad[head], grad_scores, rows)

    def gradient(self, heads: tuple[int, ...]) -> Tensor:
        return sum_by_bucket(self._grad[list(heads)], self._buckets)


class _DenseBias:
    """A dense bias, gradients summed over the batch where it is shared."""

    def __init__(self, dense: Tensor, dtype: torch.dtype) -> None:
        self._dense, self._dtype = dense, dtype
        self._grads: dict[tuple[int, int], Tensor] = {}

    def block(self, row: int, head: int, rows: slice, keys: slice) -> Tensor:
        return self._dense[row % len(self._dense), head, rows, keys]

    def add(self, row: int, head: int, rows: slice, keys: slice, grad_scores: Tensor) -> None:
        place = (row % len(self._dense), head)
        if place not in self._grads:
            shape = self._dense.shape[2:]
            self._grads[place] = torch.zeros(shape, dtype=self._dtype, device=self._dense.device)
        self._grads[place][rows, keys] += grad_scores

    def gradient(self, heads: tuple[int, ...]) -> Tensor:
        rows = range(len(self._dense))
        return torch.stack([torch.stack([self._grads[row, head] for head in heads]) for row in rows])


def _bias(workload: Workload, inputs: Inputs, dtype: torch.dtype) -> _TableBias | _DenseBias:
    if inputs.dense is not None:
        return _DenseBias(inputs.dense, dtype)
    return _TableBias(workload, inputs, dtype)


def sums_by_distance(matrix: Tensor) -> Tensor:
    """Return the sums over equal `j - i` of a matrix [L, L], in float64: [2 * L - 1], from -(L - 1) to L - 1."""
    length = len(matrix)
    total = torch.zeros(2 * length - 1, dtype=torch.float64, device=matrix.device)
    block = max(1, _BLOCK_ELEMENTS // length)
    for start in range(0, length, block):
        rows = slice(start, min(start + block, length))
        _add_by_distance(total, matrix[rows].double(), rows)
    return total


def _add_by_distance(total: Tensor, scores: Tensor, rows: slice) -> None:
    first = (len(total) + 1) // 2 - rows.stop
    sums = _diagonal_sums(scores)
    total[first : first + len(sums)] += sums


def _diagonal_sums(scores: Tensor) -> Tensor:
    """Return the sums over equal `j - i` of a matrix [m, n]: [m + n - 1], from -(m - 1) to n - 1."""
    rows, columns = scores.shape
    # With one column more than the result, each row of the padded matrix begins one place further to the right.
    skewed = F.pad(scores.flip(0), (0, rows)).flatten()[: rows * (rows + columns - 1)]
    return skewed.view(rows, rows + columns - 1).sum(0)


def sum_by_bucket(by_distance: Tensor, buckets: Tensor) -> Tensor:
    """Sum values [H, distances] over the distances of each bucket: [32, H]."""
    members = buckets[:, None] == torch.arange(NUM_BUCKETS, device=buckets.device)
    return torch.stack([(by_distance * members[:, bucket]).sum(-1) for bucket in range(NUM_BUCKETS)])
