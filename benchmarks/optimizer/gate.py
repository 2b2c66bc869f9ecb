"""The correctness gate: two clipped steps of some tensors against the same optimizer in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.optimizer.implementations import Implementation, clip
from benchmarks.optimizer.workload import MAX_NORM, Workload
from benchmarks.subject import GateError
from fat5.optim import AdamWScale

_STEPS = 2
# Of the norm of the change. A step that does nothing is off by 1.
LIMIT_COMPENSATED, LIMIT_ROUNDED = 0.02, 0.5
_NORM_LIMIT = {"bf16": 1e-2, "fp32": 1e-5}


def check(workload: Workload, implementation: Implementation, device: torch.device) -> float:
    """Return the share of the tolerance that the worst tensor takes.

    Compared is how far two steps brought the largest, the smallest and the last tensor of each group, the compensation
    counted: the norm of the difference over that of the exact change. Where nothing makes up for the rounding of bf16,
    half of the change may be lost.

    Raises:
        GateError: A tensor went elsewhere, or the norm of the gradients is wrong.
    """
    optimizer = implementation.make(workload.groups(device))
    chosen = [_some(group["params"]) for group in optimizer.param_groups]
    starts = [[parameter.detach().double() for parameter in part] for part in chosen]
    exact_norm = _exact_norm(optimizer)
    exact = _exact(optimizer, chosen, implementation, exact_norm)
    norm = float(clip(optimizer))
    if not abs(norm - exact_norm) <= _NORM_LIMIT[workload.dtype] * exact_norm:
        raise GateError(f"the norm of the gradients is {norm:.6g}, expected {exact_norm:.6g}")
    optimizer.step()
    for _ in range(_STEPS - 1):
        if isinstance(optimizer, AdamWScale):
            clip(optimizer)  # the others' gradients are clipped
        optimizer.step()
    exact_enough = implementation.compensated or workload.dtype == "fp32"
    limit = LIMIT_COMPENSATED if exact_enough else LIMIT_ROUNDED
    worst = 0.0
    for parameters, before, truths in zip(chosen, starts, exact, strict=True):
        for parameter, start, truth in zip(parameters, before, truths, strict=True):
            error = ((_known(optimizer, parameter) - truth).norm() / (truth - start).norm()).item()
            if not error <= limit:
                shape = tuple(parameter.shape)
                raise GateError(f"a tensor of shape {shape} is off by {error:.2e} of its change, allowed {limit:.0e}")
            worst = max(worst, error / limit)
    return worst


def _some(parameters: list[Tensor]) -> list[Tensor]:
    places = {max(range(len(parameters)), key=lambda n: parameters[n].numel()), len(parameters) - 1}
    places.add(min(range(len(parameters)), key=lambda n: parameters[n].numel()))
    return [parameters[n] for n in sorted(places)]


def _exact_norm(optimizer: Optimizer) -> float:
    gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    return math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))


def _exact(
    optimizer: Optimizer, chosen: list[list[Tensor]], implementation: Implementation, norm: float
) -> list[list[Tensor]]:
    """Return the chosen tensors after two steps in float64."""
    groups = []
    for group, parameters in zip(optimizer.param_groups, chosen, strict=True):
        twins = [torch.nn.Parameter(parameter.detach().double()) for parameter in parameters]
        for twin, parameter in zip(twins, parameters, strict=True):
            twin.grad = parameter.grad.double() * min(1.0, MAX_NORM / (norm + 1e-6))
        groups.append({"params": twins, "weight_decay": group["weight_decay"]})
    if isinstance(optimizer, AdamWScale):
        twin_optimizer: Optimizer = AdamWScale(groups, lr=optimizer.defaults["lr"], foreach=False)
    else:
        twin_optimizer = implementation.make(groups)
    for _ in range(_STEPS):
        twin_optimizer.step()
    return [[twin.detach() for twin in group["params"]] for group in groups]


def _known(optimizer: Optimizer, parameter: Tensor) -> Tensor:
    compensation = optimizer.state[parameter].get("compensation")
    value = parameter.detach().double()
    return value if compensation is None else value + compensation.double()
