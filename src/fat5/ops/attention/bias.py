"""Additive attention biases: T5's relative positions, ALiBi, and any dense tensor.

Every bias is a plain holder of tensors. Distances are `d = j - i`: the position of the key minus the position of the
query, positive where the key comes later.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def bucket_edges(num_buckets: int, max_distance: int) -> tuple[int, ...]:
    """Return, for one direction, the smallest distance of each bucket after the first.

    T5 gives distances below `num_buckets // 2` a bucket each and spaces the others evenly in the logarithm up to
    `max_distance`; the last bucket holds everything beyond. The logarithm is taken in float32, as T5's own code does:
    at the edges between two buckets the rounding decides. The result holds for every distance, so that no logarithm
    is ever taken on a device.
    """
    # A range makes a traced size a host integer: the edges are constants of a compiled graph.
    return _bucket_edges(len(range(num_buckets)), max_distance)


@torch.compiler.assume_constant_result
def _bucket_edges(num_buckets: int, max_distance: int) -> tuple[int, ...]:
    return _compute_edges(num_buckets, max_distance)


@functools.lru_cache(maxsize=64)
def _compute_edges(num_buckets: int, max_distance: int) -> tuple[int, ...]:
    exact = num_buckets // 2
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            f"got num_buckets={num_buckets} a direction and max_distance={max_distance}; T5's buckets need at least 2 "
            f"a direction and max_distance > {exact}, half of them"
        )
    n = np.arange(exact, max_distance + 1)
    position = np.log(n.astype(np.float32) / np.float32(exact)) / np.float32(math.log(max_distance / exact))
    buckets = np.minimum(exact + (position * np.float32(num_buckets - exact)).astype(np.int64), num_buckets - 1)
    first = np.searchsorted(buckets, np.arange(exact, num_buckets))
    return (*range(1, exact), *(int(exact + i) for i in first))


def saturation_radius(num_buckets: int, bidirectional: bool, max_distance: int) -> int:
    """Return the distance from which T5's bias is constant: 91 for 32 bidirectional buckets up to 128, 113 causal."""
    return bucket_edges(num_buckets // 2 if bidirectional else num_buckets, max_distance)[-1]


def relative_position_buckets(distance: Tensor, *, num_buckets: int, bidirectional: bool, max_distance: int) -> Tensor:
    """Return T5's bucket of each distance, equal to Transformers' for every distance.

    Args:
        distance: integer tensor of any shape, key position minus query position.
        num_buckets: buckets in all; bidirectional buckets are split evenly, later keys in the upper half.
        bidirectional: False for a causal decoder, where all later keys fall into bucket 0.
        max_distance: distance from which the last bucket holds, in tokens.

    Returns:
        int64 tensor of the same shape, in [0, num_buckets).

    Source: Raffel et al., Exploring the limits of transfer learning (T5), section 2.1.
    """
    one_side = num_buckets // 2 if bidirectional else num_buckets
    magnitude = distance.abs() if bidirectional else (-distance).clamp_min(0)
    buckets = torch.zeros_like(distance, dtype=torch.int64)
    for edge in bucket_edges(one_side, max_distance):
        buckets += magnitude >= edge
    return buckets + one_side * (distance > 0) if bidirectional else buckets


@functools.lru_cache(maxsize=64)
def _cached_buckets(num_buckets: int, bidirectional: bool, max_distance: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a tensor made in inference mode could not serve a training later on
        return _table_buckets(num_buckets, bidirectional, max_distance, device)


def _table_buckets(num_buckets: int, bidirectional: bool, max_distance: int, device: torch.device) -> Tensor:
    radius = saturation_radius(num_buckets, bidirectional, max_distance)
    distance = torch.arange(-radius, radius + 1, device=device)
    return relative_position_buckets(
        distance, num_buckets=num_buckets, bidirectional=bidirectional, max_distance=max_distance
    )


@dataclass(frozen=True)
class DistanceBias:
    """A bias that depends on the distance alone and is constant beyond a radius R.

    `bias[h, i, j] = table[h, clamp(j - i, -R, R) + R]`

    Args:
        table: [H, 2R + 1], float32 (float64 for float64 queries); R is taken from its width.
    """

    table: Tensor

    def __post_init__(self) -> None:
        if self.table.ndim != 2 or self.table.shape[1] % 2 == 0:
            raise ValueError(f"got a distance table of shape {list(self.table.shape)}; expected [heads, 2 * R + 1]")

    @property
    def num_heads(self) -> int:
        """Heads of the table."""
        return self.table.shape[0]

    def dense(self, num_queries: int, num_keys: int, query_offset: int | Tensor) -> Tensor:
        """Return the bias as a tensor [1 or B, H, Lq, Lk], differentiable to the table; quadratic in the length."""
        radius = self.table.shape[1] // 2
        device = self.table.device
        queries = torch.arange(num_queries, device=device)[:, None]
        offset = query_offset.to(device).view(-1, 1, 1) if isinstance(query_offset, Tensor) else query_offset
        distance = (torch.arange(num_keys, device=device) - queries - offset).clamp(-radius, radius)
        values = self.table[:, distance + radius]  # [H, Lq, Lk] or [H, B, Lq, Lk]
        return values[None] if values.ndim == 3 else values.transpose(0, 1)


def _has_kernels(table: Tensor) -> bool:
    """Whether to launch Triton's kernels: on a GPU, but not where a compiler makes one kernel of plain PyTorch."""
    from fat5.ops.kernels_or_torch import takes_kernels  # which imports the backends, and they this module

    return not torch.compiler.is_compiling() and takes_kernels("RelativeBias", "auto", table)


class _ExpandBuckets(torch.autograd.Function):
    """Look up a table [num_buckets, H] at buckets [2R + 1], as [H, 2R + 1]; the gradient adds up without atomics."""

    @staticmethod
    def forward(ctx, table, buckets):
        ctx.save_for_backward(buckets)
        ctx.num_buckets = table.shape[0]
        return table.T.index_select(1, buckets)

    @staticmethod
    def backward(ctx, grad):
        (buckets,) = ctx.saved_tensors
        one_hot = buckets == torch.arange(ctx.num_buckets, device=grad.device)[:, None]  # [num_buckets, 2R + 1]
        return (grad * one_hot[:, None]).sum(-1), None


@dataclass(frozen=True)
class RelativeBias:
    """T5's learned relative position bias.

    `bias[h, i, j] = table[bucket(j - i), h]`, with the buckets of `relative_position_buckets`.

    Args:
        table: [num_buckets, H], T5's own `relative_attention_bias.weight`, any floating type.
        bidirectional: True in an encoder, False in a causal decoder.
        max_distance: distance from which the last bucket holds, in tokens.
    """

    table: Tensor
    bidirectional: bool
    max_distance: int = 128

    def __post_init__(self) -> None:
        if self.table.ndim != 2 or not self.table.is_floating_point():
            raise ValueError(
                f"got a bias table of shape {list(self.table.shape)} and type {self.table.dtype}; "
                "expected a floating tensor [num_buckets, heads]"
            )
        num_buckets = self.table.shape[0]
        if self.bidirectional and num_buckets % 2:
            raise ValueError(f"got {num_buckets} bidirectional buckets; expected an even number, half a direction")
        bucket_edges(num_buckets // 2 if self.bidirectional else num_buckets, self.max_distance)

    @property
    def num_heads(self) -> int:
        """Heads of the table."""
        return self.table.shape[1]

    def by_distance(self) -> DistanceBias:
        """Expand the buckets to one entry a distance, in float32 at least.

        A stack of layers that share the table expands it once and passes the result to each layer. The gradient is
        a sum over the entries of each bucket, in float32 and in a fixed order: no atomics, no matrix product that a
        TF32 or autocast setting could round.
        """
        num_buckets = self.table.shape[0]
        find = _table_buckets if torch.compiler.is_compiling() else _cached_buckets
        buckets = find(num_buckets, self.bidirectional, self.max_distance, self.table.device)
        if _has_kernels(self.table):
            from fat5.ops.attention.bucket_kernels import expand_buckets

            return DistanceBias(expand_buckets(self.table, buckets))
        table = self.table.to(torch.promote_types(self.table.dtype, torch.float32))
        return DistanceBias(_ExpandBuckets.apply(table, buckets))


@dataclass(frozen=True)
class AlibiBias:
    """ALiBi: a penalty that grows linearly with the distance.

    `bias[h, i, j] = -slopes[h] * |j - i|` if symmetric, else `slopes[h] * (j - i)`, the causal form.

    Args:
        slopes: [H], fixed or learned, any floating type.
        symmetric: True in an encoder; in a causal decoder both forms are equal.

    Source: Press et al., Train short, test long (2022).
    """

    slopes: Tensor
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.slopes.ndim != 1 or not self.slopes.is_floating_point():
            raise ValueError(
                f"got slopes of shape {list(self.slopes.shape)} and type {self.slopes.dtype}; "
                "expected a floating tensor [heads]"
            )

    @property
    def num_heads(self) -> int:
        """Number of slopes."""
        return self.slopes.shape[0]


@dataclass(frozen=True)
class DenseBias:
    """Any additive bias, materialised: memory is quadratic in the length.

    Entries of -inf mask a key; a row that is masked whole gives 0.

    Args:
        tensor: [B or 1, H or 1, Lq or 1, Lk], any floating type. Its gradient is summed in float32 over exactly the
            axes that are broadcast.
    """

    tensor: Tensor

    def __post_init__(self) -> None:
        if self.tensor.ndim != 4 or not self.tensor.is_floating_point():
            raise ValueError(
                f"got a dense bias of shape {list(self.tensor.shape)} and type {self.tensor.dtype}; "
                "expected a floating tensor [B or 1, H or 1, Lq or 1, Lk]"
            )


AttentionBias = RelativeBias | DistanceBias | AlibiBias | DenseBias
