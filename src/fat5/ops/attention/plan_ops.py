"""Plans of attention as custom ops, one a backend that has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fat5.ops.attention.custom_ops import takes_settings
from fat5.ops.attention.problem import Problem
from fat5.ops.operators import operator


def define_plan_op(name: str, make: Callable[..., Tensor], size: Callable[..., int]) -> Any:
    """Register `fat5::{name}_attention_plan`, and return it. It has no gradient: a plan is of integers.

    Args:
        name: Name of the backend.
        make: Maps a problem, and whether its backward is to be planned too, to an int32 tensor.
        size: Maps the same to its length, without looking at a value or an address.
    """

    def fake(q, k, backward, *settings):
        return q.new_empty(size(Problem(q, k, k, *settings), backward=backward), dtype=torch.int32)

    @operator(f"{name}_attention_plan", fake=fake)
    @takes_settings
    def plan(q: Tensor, k: Tensor, backward: bool, *settings: Any) -> Tensor:
        return make(Problem(q, k, k, *settings), backward=backward)

    return plan
