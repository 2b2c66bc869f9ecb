"""Plans of attention as custom ops, one a backend that has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fat5.ops.attention.problem import Problem
from fat5.ops.operators import operator


def define_plan_op(name: str, make: Callable[..., Tensor], size: Callable[..., int]) -> Any:
    """Register `fat5::{name}_attention_plan`, and return it. It has no gradient: a plan is of integers.

    Args:
        name: Name of the backend.
        make: Maps a problem, and whether its backward is to be planned too, to an int32 tensor.
        size: Maps the same to its length, without looking at a value or an address.
    """

    def problem_of(q, k, settings):
        return Problem(*(q, k, k, *settings, 0.0, None))

    def fake(q, k, backward, *settings):
        return q.new_empty(size(problem_of(q, k, settings), backward=backward), dtype=torch.int32)

    @operator(f"{name}_attention_plan", fake=fake)
    def plan(
        q: Tensor,
        k: Tensor,
        backward: bool,
        bias: Tensor | None,
        bias_kind: str,
        offset: int | None,
        offsets: Tensor | None,
        key_starts: Tensor | None,
        key_lengths: Tensor | None,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        softmax_scale: float,
        causal: bool,
    ) -> Tensor:
        settings = (
            bias, bias_kind, offset, offsets, key_starts, key_lengths, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal
        )  # fmt: skip
        return make(problem_of(q, k, settings), backward=backward)

    return plan
