"""Products of linear layers in tensors that are there already."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from fat5.nn.joined import is_plain


@torch.no_grad()
def multiply_into(linear: nn.Module, states: Tensor, out: Tensor) -> None:
    """Write what a linear layer makes of states [..., d_model] into a contiguous tensor of as many elements."""
    if is_plain(linear) and not torch.is_autocast_enabled(states.device.type):
        weight = cast(nn.Linear, linear).weight
        if weight.dtype == states.dtype == out.dtype:
            torch.mm(states.flatten(0, -2), weight.t(), out=out.view(-1, weight.shape[0]))
            return
    out.copy_(linear(states).view(out.shape))
