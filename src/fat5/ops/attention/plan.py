"""Plans: what kernels of attention read that depends on lengths and bias alone, made once for many calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fat5.ops.attention.api import autocast, op_arguments
from fat5.ops.attention.backends import choose_backend


@dataclass(frozen=True)
class AttentionPlan:
    """What calls of attention read that have the same sizes, lengths and bias, see `plan_attention`.

    Attributes:
        content: Integers that the backend alone reads.
        sizes: Of q and of k, without the head dimension.
        arguments: What it was made of.
    """

    content: Tensor
    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    arguments: tuple[Any, ...]

    def fits(self, q: Tensor, k: Tensor, arguments: tuple[Any, ...]) -> bool:
        """Whether it was made of the very tensors, and of equal settings, that a call's `op_arguments` are."""
        if self.sizes != _sizes(q, k) or self.content.device != q.device:
            return False
        for own, other in zip(self.arguments, arguments, strict=True):
            if isinstance(own, Tensor) or isinstance(other, Tensor):
                if own is not other:
                    return False
            elif own != other:
                return False
        return True


def plan_attention(q: Tensor, k: Tensor, *, backend: str = "auto", **options: Any) -> AttentionPlan | None:
    """Return what the layers of a stack can share beside lengths and bias, to be given to each as `plan`.

    The backend `hopper` lists the tiles of ragged batches, and expands the bias, at each call that has no plan. A plan
    holds an ordinary tensor: made on the device, anew for each batch, also in a CUDA graph. No result depends on it, as
    long as the lengths and the bias keep the values that it was made from: make it again after any change in place.

    Args:
        q: Queries of any of the calls: their sizes count alone.
        k: Keys, likewise.
        backend: See `flash_attention`.
        **options: `bias`, `causal`, `softmax_scale`, `query_offset`, lengths and offsets of `flash_attention`. The
            calls are to give the same tensors, and as `bias` a `DistanceBias` or `AlibiBias` of the same tensor: a
            `RelativeBias` is expanded anew in each call.

    Returns:
        The plan; for the backward too, where gradients are recorded. None where the backend has none.

    Raises:
        ValueError: As `flash_attention`.
    """
    q, k = autocast(q), autocast(k)
    make = choose_backend(backend, q, keys="planned")
    if make is None:
        return None
    options["softmax_scale"] = abs(options.get("softmax_scale", 1.0))
    arguments = op_arguments(q, k, k, **options)
    tensors = [x.detach() if isinstance(x, Tensor) else x for x in (q, k, *arguments)]
    content = make(tensors[0], tensors[1], torch.is_grad_enabled(), *tensors[2:])
    return AttentionPlan(content, _sizes(q, k), arguments)


def _sizes(q: Tensor, k: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(q.shape[:-1]), tuple(k.shape[:-1])
