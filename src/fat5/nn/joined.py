"""Weights of linear maps of one input, one below the other, so that one matrix product does for all.

The parameters stay apart, as checkpoints, the optimiser and adapters know them: a copy of some MiB joins them on the
way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fat5.ops.joining import join_matrices

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_APART = "_kept_apart"


def is_plain(linear: nn.Module) -> bool:
    """Whether a module does nothing but multiply by a plain weight, so that its weight stands for it.

    Not so an adapter's, a quantised or a parametrised one, one with hooks or a bias, and one whose weight is sharded.
    """
    if type(linear) is not nn.Linear or linear.bias is not None or is_wrapped(linear):
        return False
    return type(linear.weight) in (nn.Parameter, Tensor)


def is_wrapped(module: nn.Module) -> bool:
    """Whether somebody waits for a call of a module: its `forward` is replaced, or it has hooks."""
    # Wrappers of a module's method, as for offloading, replace it in the instance.
    return "forward" in vars(module) or any(getattr(module, hooks) for hooks in _HOOKS)


def keep_apart(module: nn.Module) -> None:
    """Have the linear maps of a module multiplied one by one from now on.

    For weights that are gathered anew for the backward: a joined copy is kept from the forward to the backward, whole.
    """
    for linear in module.modules():
        if isinstance(linear, nn.Linear):
            setattr(linear, _APART, True)


def can_join(linears: Sequence[nn.Linear]) -> bool:
    """Whether all are plain, of one type and on one device, and nobody wants them apart."""
    if not all(is_plain(linear) and _APART not in vars(linear) for linear in linears):
        return False
    return len({(linear.weight.dtype, linear.weight.device) for linear in linears}) == 1


def joined_weight(linears: Sequence[nn.Linear], states: Tensor) -> Tensor | None:
    """Return the weights one below the other, differentiably, or None where each map is to be taken by itself.

    That is where they cannot be joined, where some are frozen and others not, and without gradients where the copy
    costs as much as the product: on a CPU, and for inputs smaller than the weights, such as a step of decoding.

    Args:
        linears: Maps of one input.
        states: That input.
    """
    # What is cheapest to see comes first: a step of decoding asks in each layer.
    if any(type(linear) is not nn.Linear for linear in linears):
        return None
    weights = [linear.weight for linear in linears]
    if not torch.is_grad_enabled():
        if states.device.type == "cpu" or states.numel() < sum(weight.numel() for weight in weights):
            return None
    elif len({weight.requires_grad for weight in weights}) > 1:
        return None
    return torch.cat(weights) if can_join(linears) else None


def joined_weights(groups: Sequence[Sequence[nn.Linear]]) -> list[Tensor | None]:
    """Return what `joined_weight` returns for each group with gradients on, of all groups in a few launches.

    Their gradients come together too, with the last one: for a graph whose gradients all come at its end.

    Args:
        groups: Maps of one input each; None for one without maps.
    """
    joined: list[Tensor | None] = [None] * len(groups)
    alike = defaultdict(list)
    for place, group in enumerate(groups):
        if group and can_join(group) and len({linear.weight.requires_grad for linear in group}) == 1:
            weight = group[0].weight
            alike[weight.requires_grad, weight.dtype, weight.device].append(place)
    for places in alike.values():
        weights = [linear.weight for place in places for linear in groups[place]]
        for place, weight in zip(places, join_matrices(weights, [len(groups[p]) for p in places]), strict=True):
            joined[place] = weight
    return joined
