"""Where the tensors of a step lie: whether the launches of the step before serve again, at the cost of a glance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Addresses = tuple[list[int], list[torch.dtype], list[tuple[Any, ...]]]
"""Addresses of parameters, gradients and state; types of parameters and gradients; the settings that say which tensors
share a launch."""

_NO_GRADIENT = -1
_SHARING = ("betas", "eps", "kahan", "foreach", "fused")


def addresses_of(groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, dict[str, Tensor]]) -> Addresses | None:
    """Return the addresses of all that a step reads and writes, None where that is not all there is to know.

    Two steps with equal addresses differ at most in learning rate and decay. No tensor is held: a gradient that is
    dropped gives its memory back. Lists of numbers alone, since thousands of small objects a step would also set the
    garbage collector going.

    Args:
        groups: The optimizer's.
        state: The optimizer's.
    """
    numbers: list[int] = []
    dtypes: list[torch.dtype] = []
    for group in groups:
        for parameter in group["params"]:
            grad = parameter.grad
            if grad is None:
                numbers.append(_NO_GRADIENT)
                continue
            own = state.get(parameter)
            if type(grad) is not Tensor or grad.is_sparse or not grad.is_contiguous() or not own:
                return None
            low = own.get("compensation")
            numbers += (
                parameter.data_ptr(), grad.data_ptr(), own["exp_avg"].data_ptr(), own["exp_avg_sq"].data_ptr(),
                own["step"].data_ptr(), 0 if low is None else low.data_ptr(),
            )  # fmt: skip
            dtypes += (parameter.dtype, grad.dtype)
    return numbers, dtypes, [tuple(group[name] for name in _SHARING) for group in groups]
