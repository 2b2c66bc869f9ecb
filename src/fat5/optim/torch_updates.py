"""The update of AdamWScale in PyTorch's own operations, one tensor at a time or many."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

MIN_SCALE = 1e-3
_BUCKET_ELEMENTS = 2**24

# One parameter's tensors: parameter, gradient, and its state.
Entry = tuple[Tensor, Tensor, dict[str, Tensor]]


class Settings(NamedTuple):
    """What a group's update depends on."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def update_each(entries: Iterable[Entry], settings: Settings, grad_scale: Tensor | None) -> None:
    """Take a step of each tensor by itself; the gradients count `grad_scale` times, a 0-d float32 tensor."""
    for parameter, grad, state in entries:
        _update_one(parameter, grad, state, *settings, grad_scale=grad_scale)


def update_many(entries: Iterable[Entry], settings: Settings, grad_scale: Tensor | None) -> None:
    """Do the same with a few operations for many tensors, and their size in float32 as temporary memory."""
    for bucket in _buckets(entries):
        _update_bucket(bucket, *settings, grad_scale=grad_scale)


def grad_norms(entries: Iterable[Entry]) -> list[Tensor]:
    """Return the norms of gradients as 0-d tensors in float32 or above, one a tensor."""
    by_type: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    for _, grad, _ in entries:
        by_type[grad.device, grad.dtype].append(grad)
    return [
        norm
        for (_, dtype), grads in by_type.items()
        for norm in torch._foreach_norm(grads, dtype=torch.promote_types(dtype, torch.float32))
    ]


def bias_correction(beta: float, step: Tensor) -> Tensor:
    """Return 1 - beta^step; through expm1, since float32 would lose the digits of 1 - 0.999."""
    return -torch.expm1(step * (math.log(beta) if beta else -math.inf))


def _on_device(value: float | Tensor, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


def _update_one(
    parameter: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    *,
    grad_scale: Tensor | None,
) -> None:
    exp_avg, exp_avg_sq, compensation = state["exp_avg"], state["exp_avg_sq"], state.get("compensation")
    wide = exp_avg_sq.dtype
    lr = _on_device(lr, parameter.device)
    grad = grad.to(wide)
    if grad_scale is not None:
        grad = grad * _on_device(grad_scale, grad.device)
    first = exp_avg.to(wide).lerp_(grad, 1.0 - beta1)
    exp_avg.copy_(first)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)

    value = parameter.to(wide, copy=True)
    rms = torch.linalg.vector_norm(value) / math.sqrt(max(1, value.numel()))
    if compensation is not None:
        value += compensation
    step = state["step"].add_(1.0).to(wide)
    step_size = lr * rms.clamp_min(MIN_SCALE) / bias_correction(beta1, step)
    denominator = exp_avg_sq.sqrt().div_(bias_correction(beta2, step).sqrt()).add_(eps)
    if weight_decay:
        value *= 1.0 - lr * weight_decay
    value -= first.div(denominator).mul_(step_size)
    parameter.copy_(value)
    if compensation is not None:
        compensation.copy_(value - parameter)


def _buckets(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Yield groups of entries of one device and one set of types, small enough to bound the temporary memory."""
    by_type: dict[tuple[Any, ...], list[Entry]] = defaultdict(list)
    for entry in entries:
        parameter, grad, state = entry
        by_type[parameter.device, parameter.dtype, grad.dtype, "compensation" in state].append(entry)
    for alike in by_type.values():
        bucket: list[Entry] = []
        elements = 0
        for entry in alike:
            elements += entry[0].numel()
            if bucket and elements > _BUCKET_ELEMENTS:
                yield bucket
                bucket, elements = [], entry[0].numel()
            bucket.append(entry)
        yield bucket


def _widened(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return new tensors with the values of `tensors` in `dtype`."""
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def _update_bucket(
    entries: list[Entry],
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    *,
    grad_scale: Tensor | None,
) -> None:
    """Do what `_update_one` does for all entries, in the same order of operations."""
    parameters = [entry[0] for entry in entries]
    steps, exp_avgs, exp_avg_sqs = ([entry[2][name] for entry in entries] for name in ("step", "exp_avg", "exp_avg_sq"))
    compensations = [entry[2]["compensation"] for entry in entries if "compensation" in entry[2]]  # of all or none
    wide = exp_avg_sqs[0].dtype
    lr = _on_device(lr, parameters[0].device)
    scratch = _widened([entry[1] for entry in entries], wide)  # the gradients, and later whatever comes next
    if grad_scale is not None:
        torch._foreach_mul_(scratch, _on_device(grad_scale, parameters[0].device).to(wide))
    change = _widened(exp_avgs, wide)
    torch._foreach_lerp_(change, scratch, 1.0 - beta1)
    torch._foreach_copy_(exp_avgs, change)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, scratch, scratch, 1.0 - beta2)

    values = _widened(parameters, wide)
    norms = torch._foreach_norm(values)
    if compensations:
        torch._foreach_copy_(scratch, compensations)
        torch._foreach_add_(values, scratch)
    # the scalars of all tensors as one small vector each: a few launches, and not a few for each tensor
    torch._foreach_add_(steps, 1.0)
    step = torch.stack(steps).to(wide)
    torch._foreach_div_(norms, [math.sqrt(max(1, parameter.numel())) for parameter in parameters])
    step_size = lr * torch.stack(norms).clamp_min_(MIN_SCALE) / bias_correction(beta1, step)
    torch._foreach_copy_(scratch, exp_avg_sqs)
    torch._foreach_sqrt_(scratch)
    torch._foreach_div_(scratch, list(bias_correction(beta2, step).sqrt().unbind()))
    torch._foreach_add_(scratch, eps)
    torch._foreach_div_(change, scratch)
    torch._foreach_mul_(change, list(step_size.unbind()))
    if weight_decay:
        torch._foreach_mul_(values, 1.0 - lr * weight_decay)
    torch._foreach_sub_(values, change)
    torch._foreach_copy_(parameters, values)
    if compensations:
        torch._foreach_copy_(scratch, parameters)
        torch._foreach_sub_(values, scratch)
        torch._foreach_copy_(compensations, values)
