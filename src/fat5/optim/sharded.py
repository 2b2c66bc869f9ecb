"""AdamWScale for parameters that are spread over ranks: the RMS that scales a step is still the whole tensor's."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.optimizer import ParamsT

from fat5.optim.adamw_scale import check_settings, state_dtype
from fat5.optim.torch_updates import MIN_SCALE, bias_correction


class ShardedAdamWScale(torch.optim.Optimizer):
    """`AdamWScale` for DTensors, as `fully_shard` makes them: the same formula, state and names.

    Each rank updates its shards with PyTorch's foreach operations; the ranks that share a tensor add up their squares
    first, in one all-reduce of one number a tensor. The state of a parameter is sharded as the parameter is.

    Args:
        params: DTensors, or groups of them, all on one device mesh.
        lr: Learning rate, relative to the RMS of each whole tensor.
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay.
        kahan: Keep a compensation for parameters below float32.

    Raises:
        ValueError: A setting is out of range, or a parameter is no DTensor.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        kahan: bool = True,
    ) -> None:
        check_settings(lr, betas, eps, weight_decay, name="ShardedAdamWScale")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "kahan": kahan}
        # AdamWScale's groups have these, and either class reads the other's state dict.
        defaults |= {"foreach": None, "fused": None}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group after checking that its parameters are sharded; see torch.optim.Optimizer."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not isinstance(parameter, DTensor):
                raise ValueError(
                    f"ShardedAdamWScale: expected parameters sharded by fully_shard, got a {type(parameter).__name__} "
                    f"of shape {tuple(parameter.shape)}; AdamWScale is for whole ones"
                )

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
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._update(group, parameters)
        return loss

    def _update(self, group: dict[str, Any], parameters: list[DTensor]) -> None:
        (beta1, beta2), lr = group["betas"], group["lr"]
        states = [self._state_of(parameter, group["kahan"]) for parameter in parameters]
        wide = torch.promote_types(parameters[0].dtype, torch.float32)
        exp_avgs, exp_avg_sqs = ([_local(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq"))
        compensations = [_local(state["compensation"]) for state in states if "compensation" in state]
        grads = [_local(parameter.grad).to(wide) for parameter in parameters]
        change = [exp_avg.to(wide, copy=True) for exp_avg in exp_avgs]
        torch._foreach_lerp_(change, grads, 1.0 - beta1)
        torch._foreach_copy_(exp_avgs, change)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1.0 - beta2)

        values = [_local(parameter).to(wide, copy=True) for parameter in parameters]
        rms = whole_rms(values, parameters)
        if compensations:
            torch._foreach_add_(values, [compensation.to(wide) for compensation in compensations])
        torch._foreach_add_([state["step"] for state in states], 1.0)
        step = torch.stack([state["step"] for state in states]).to(wide)
        step_size = lr * rms.clamp_min_(MIN_SCALE) / bias_correction(beta1, step)
        denominators = torch._foreach_sqrt(exp_avg_sqs)
        torch._foreach_div_(denominators, list(bias_correction(beta2, step).sqrt().unbind()))
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_div_(change, denominators)
        torch._foreach_mul_(change, list(step_size.unbind()))
        if group["weight_decay"]:
            torch._foreach_mul_(values, 1.0 - lr * group["weight_decay"])
        torch._foreach_sub_(values, change)
        targets = [_local(parameter) for parameter in parameters]
        torch._foreach_copy_(targets, values)
        if compensations:
            torch._foreach_sub_(values, [target.to(wide) for target in targets])
            torch._foreach_copy_(compensations, values)

    def _state_of(self, parameter: DTensor, kahan: bool) -> dict[str, Tensor]:
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            names = ["exp_avg", "exp_avg_sq"]
            if kahan and state_dtype("exp_avg_sq", parameter) != parameter.dtype:
                names.append("compensation")
            for name in names:
                if name not in state:
                    state[name] = torch.zeros_like(parameter, dtype=state_dtype(name, parameter))
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state dict of whole tensors that `AdamWScale` or `whole_state_dict` made, each rank its shards."""
        ids = list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
        parameters = list(chain.from_iterable(group["params"] for group in self.param_groups))
        # Without the state: torch casts it to the parameters' type, which would round exp_avg_sq.
        super().load_state_dict({**state_dict, "state": {}})
        for index, parameter in zip(ids, parameters, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                value = torch.as_tensor(value).to(device=parameter.device, dtype=state_dtype(name, parameter))
                self.state[parameter][name] = value.clone() if name == "step" else shard_like(value, parameter)


def whole_rms(values: list[Tensor], parameters: list[DTensor]) -> Tensor:
    """Return the root mean square of whole tensors, each of which this rank holds a shard of.

        sqrt(sum over ranks of the sum of squares / elements of the whole)

    Args:
        values: This rank's shards, what is to be measured.
        parameters: The whole tensors they belong to, all on one mesh with the same placements.

    Returns:
        One number a tensor, in the values' type, equal on all ranks.
    """
    shares = torch._foreach_norm(values)
    torch._foreach_div_(shares, [math.sqrt(max(1, parameter.numel())) for parameter in parameters])
    squares = torch.stack(shares).square_()
    mesh = parameters[0].device_mesh
    for dim, placement in enumerate(parameters[0].placements):
        if placement.is_shard():
            dist.all_reduce(squares, group=mesh.get_group(dim))
    return squares.sqrt_()


def whole_state_dict(optimizer: torch.optim.Optimizer, *, keep: bool = True) -> dict[str, Any]:
    """Return an optimiser's state dict with its DTensors gathered, on the CPU; all ranks must call it.

    Args:
        optimizer: The optimiser.
        keep: False on ranks that only take part: their state is empty.
    """
    state_dict = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    for index, entry in state_dict["state"].items():
        whole = {name: gather(value, keep=keep) for name, value in entry.items()}
        if keep:
            state[index] = whole
    return {**state_dict, "state": state}


def gather(value: Any, *, keep: bool = True) -> Any:
    """Return a tensor whole and on the CPU, or None where `keep` is False; all ranks that share it must call this."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not keep:
        return None
    return value.detach().cpu() if isinstance(value, Tensor) else value


def shard_like(value: Tensor, parameter: DTensor) -> DTensor:
    """Return this rank's part of a tensor that every rank has whole, spread as `parameter` is."""
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _local(tensor: Tensor | None) -> Tensor:
    return cast(DTensor, tensor).to_local()
