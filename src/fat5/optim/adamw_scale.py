"""AdamW whose step is scaled by the size of each tensor, exact enough for parameters kept in bf16."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

MIN_SCALE = 1e-3
_BUCKET_ELEMENTS = 2**24

# One parameter's tensors: parameter, gradient, and its state.
_Entry = tuple[Tensor, Tensor, dict[str, Tensor]]


class AdamWScale(torch.optim.Optimizer):
    """AdamW with decoupled weight decay, whose step on each tensor is scaled by the tensor's root mean square.

        m = beta1 m + (1 - beta1) g          v = beta2 v + (1 - beta2) g^2
        p = p (1 - lr weight_decay) - lr max(1e-3, RMS(p)) (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    The RMS is that of the tensor before the step (Adafactor's relative step). It scales the step and not the decay,
    as in nanoT5 and flashT5; the learning rate is thus relative, and a few thousandths are usual. The group's `lr` is
    only read: a float, or a 0-d tensor.

    All arithmetic is in float32 (float64 for float64 parameters) and gradients are left as they are. For parameters in
    bf16 or float16, whose own sums would lose updates smaller than half their last bit, `compensation` holds what their
    rounding left over (Kahan summation): the value that is updated is `p + compensation`.

    State of a parameter: `step` (0-d float32), `exp_avg` and `compensation` in the parameter's type, `exp_avg_sq`
    never below float32: with beta2 = 0.999 an increment of v is near v / 1000, less than half the last bit of bf16,
    so that a bf16 v would never come down. Loading a state dict keeps these types. Nothing here makes the host wait
    for a GPU.

    Args:
        params: Parameters, or dicts of parameter groups; see `fat5.optim.parameter_groups`.
        lr: Learning rate, relative to the RMS of each tensor.
        betas: Decay rates of the two moments, in [0, 1).
        eps: Added to the root of the second moment, above 0.
        weight_decay: Decoupled decay; each step takes `lr * weight_decay` of the parameter.
        kahan: Keep a compensation for parameters below float32.
        foreach: Update many tensors a launch, with more temporary memory; None does so on GPUs.

    Raises:
        ValueError: A setting out of range, a parameter that is not real floating point, or a sparse gradient.

    References: Loshchilov and Hutter, arXiv:1711.05101; Shazeer and Stern (the scale), arXiv:1804.04235.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        kahan: bool = True,
        foreach: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "kahan": kahan,
            "foreach": foreach,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters after checking its settings; see torch.optim.Optimizer."""
        group = {**self.defaults, **param_group}
        check_settings(group["lr"], group["betas"], group["eps"], group["weight_decay"])
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.is_floating_point():
                raise ValueError(f"AdamWScale: expected real floating-point parameters, got {parameter.dtype}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step; parameters without a gradient are left alone.

        Args:
            closure: Recomputes and returns the loss, with gradients enabled.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            entries = [
                (parameter, parameter.grad, self._state_of(parameter, parameter.grad, group["kahan"]))
                for parameter in group["params"]
                if parameter.grad is not None
            ]
            settings = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
            foreach = group["foreach"]
            if foreach is None:
                foreach = all(parameter.is_cuda for parameter, _, _ in entries)
            if foreach:
                for bucket in _buckets(entries):
                    _update_many(bucket, *settings)
            else:
                for parameter, grad, state in entries:
                    _update_one(parameter, grad, state, *settings)
        return loss

    def _state_of(self, parameter: Tensor, grad: Tensor, kahan: bool) -> dict[str, Tensor]:
        """Return the state that a step of `parameter` uses, made on first use."""
        if grad.is_sparse:
            raise ValueError(
                "AdamWScale: expected dense gradients, got a sparse one; use sparse=False in the embedding"
            )
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        names = ["exp_avg", "exp_avg_sq"]
        if kahan and _state_dtype("exp_avg_sq", parameter) != parameter.dtype:
            names.append("compensation")
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(parameter, dtype=_state_dtype(name, parameter))
        return {name: state[name] for name in ("step", *names)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict and give each tensor of the state its own type, not the parameter's.

        torch.optim.Optimizer casts all floating-point state to the type of the parameter, which would round
        `exp_avg_sq`.
        """
        seen: dict[str, Any] = {}
        last = self.register_load_state_dict_pre_hook(lambda _, final: seen.update(final))
        first = self.register_load_state_dict_post_hook(lambda _: self._restore(seen), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
            first.remove()

    def _restore(self, state_dict: dict[str, Any]) -> None:
        ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, parameter in zip(ids, parameters, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                self.state[parameter][name] = (
                    torch.as_tensor(value)
                    .detach()
                    .to(device=parameter.device, dtype=_state_dtype(name, parameter), copy=True)
                )


def check_settings(
    lr: float | Tensor, betas: tuple[float, float], eps: float, weight_decay: float, name: str = "AdamWScale"
) -> None:
    """Raise ValueError on a setting out of range. A tensor `lr` is not read, since that could make the host wait."""
    if isinstance(lr, Tensor):
        if lr.ndim != 0:
            raise ValueError(f"{name}: expected lr to be a number or a 0-d tensor, got shape {tuple(lr.shape)}")
    elif not 0.0 <= lr < math.inf:
        raise ValueError(f"{name}: expected lr >= 0, got {lr}")
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"{name}: expected two betas in [0, 1), got {betas}")
    if not 0.0 < eps < math.inf:
        raise ValueError(f"{name}: expected eps > 0, got {eps}")
    if not 0.0 <= weight_decay < math.inf:
        raise ValueError(f"{name}: expected weight_decay >= 0, got {weight_decay}")


def _state_dtype(name: str, parameter: Tensor) -> torch.dtype:
    if name == "step":
        return torch.float32
    return torch.promote_types(parameter.dtype, torch.float32) if name == "exp_avg_sq" else parameter.dtype


def _bias_correction(beta: float, step: Tensor) -> Tensor:
    """Return 1 - beta^step; through expm1, since float32 would lose the digits of 1 - 0.999."""
    return -torch.expm1(step * (math.log(beta) if beta else -math.inf))


def _update_one(
    parameter: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    exp_avg, exp_avg_sq, compensation = state["exp_avg"], state["exp_avg_sq"], state.get("compensation")
    wide = exp_avg_sq.dtype
    grad = grad.to(wide)
    first = exp_avg.to(wide).lerp_(grad, 1.0 - beta1)
    exp_avg.copy_(first)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)

    value = parameter.to(wide, copy=True)
    if compensation is not None:
        value += compensation
    step = state["step"].add_(1.0).to(wide)
    rms = torch.linalg.vector_norm(value) / math.sqrt(max(1, value.numel()))
    step_size = lr * rms.clamp_min(MIN_SCALE) / _bias_correction(beta1, step)
    denominator = exp_avg_sq.sqrt().div_(_bias_correction(beta2, step).sqrt()).add_(eps)
    if weight_decay:
        value *= 1.0 - lr * weight_decay
    value -= first.div(denominator).mul_(step_size)
    parameter.copy_(value)
    if compensation is not None:
        compensation.copy_(value - parameter)


def _buckets(entries: Iterable[_Entry]) -> Iterator[list[_Entry]]:
    """Yield groups of entries of one device and one set of types, small enough to bound the temporary memory."""
    by_type: dict[tuple[Any, ...], list[_Entry]] = defaultdict(list)
    for entry in entries:
        parameter, grad, state = entry
        by_type[parameter.device, parameter.dtype, grad.dtype, "compensation" in state].append(entry)
    for alike in by_type.values():
        bucket: list[_Entry] = []
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


def _update_many(
    entries: list[_Entry],
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Do what `_update_one` does for all entries, in the same order of operations."""
    parameters = [entry[0] for entry in entries]
    steps, exp_avgs, exp_avg_sqs = ([entry[2][name] for entry in entries] for name in ("step", "exp_avg", "exp_avg_sq"))
    compensations = [entry[2]["compensation"] for entry in entries if "compensation" in entry[2]]  # of all or none
    wide = exp_avg_sqs[0].dtype
    if isinstance(lr, Tensor):
        lr = lr.to(parameters[0].device, non_blocking=True)
    scratch = _widened([entry[1] for entry in entries], wide)  # the gradients, and later whatever comes next
    change = _widened(exp_avgs, wide)
    torch._foreach_lerp_(change, scratch, 1.0 - beta1)
    torch._foreach_copy_(exp_avgs, change)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, scratch, scratch, 1.0 - beta2)

    values = _widened(parameters, wide)
    if compensations:
        torch._foreach_copy_(scratch, compensations)
        torch._foreach_add_(values, scratch)
    # the scalars of all tensors as one small vector each: a few launches, and not a few for each tensor
    torch._foreach_add_(steps, 1.0)
    step = torch.stack(steps).to(wide)
    norms = torch._foreach_norm(values)
    torch._foreach_div_(norms, [math.sqrt(max(1, parameter.numel())) for parameter in parameters])
    step_size = lr * torch.stack(norms).clamp_min_(MIN_SCALE) / _bias_correction(beta1, step)
    torch._foreach_copy_(scratch, exp_avg_sqs)
    torch._foreach_sqrt_(scratch)
    torch._foreach_div_(scratch, list(_bias_correction(beta2, step).sqrt().unbind()))
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
