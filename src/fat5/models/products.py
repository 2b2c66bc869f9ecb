"""Products of linear layers in tensors that are there already."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn


@torch.no_grad()
def multiply_into(linear: nn.Module, states: Tensor, out: Tensor) -> None:
    """Write what a linear layer makes of states [..., d_model] into a contiguous tensor of as many elements."""
    if _is_plain(linear) and not torch.is_autocast_enabled(states.device.type):
        weight = cast(nn.Linear, linear).weight
        if weight.dtype == states.dtype == out.dtype:
            torch.mm(states.flatten(0, -2), weight.t(), out=out.view(-1, weight.shape[0]))
            return
    out.copy_(linear(states).view(out.shape))


def _is_plain(linear: nn.Module) -> bool:
    hooked = linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear)
    return type(linear) is nn.Linear and linear.bias is None and not hooked
