"""Settings of the optimizer and the schedule, and what builds both from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fat5.errors import ConfigError, nearest
from fat5.optim.adamw_scale import AdamWScale, check_form, check_settings
from fat5.optim.fused_update import refuses, unavailable
from fat5.optim.groups import parameter_groups
from fat5.optim.schedules import check_schedule, get_schedule

OPTIMIZERS = ("adamw_scale", "adamw")
_DEFAULT_LR = {"adamw_scale": 5e-3, "adamw": 1e-3}
_DEFAULT_WARMUP_RATIO = 0.05


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer.

    Attributes:
        name: adamw_scale (AdamW whose step is scaled by the RMS of each tensor) or adamw (PyTorch's own, fused).
        lr: Peak learning rate. adamw_scale: relative to the RMS of each tensor, 0.005 if not given; adamw: 0.001.
        betas: Decay rates of the first and second moment, each in [0, 1).
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay of matrices; norms, biases and relative position biases never decay.
        kahan: Keep the rounding errors of bf16 and float16 parameters and make up for them; on if not given.
            adamw_scale only.
        foreach: Update many tensors at a time with more temporary memory; if not given, on GPUs without fused kernels.
        fused: Update all tensors in a few launches of kernels; if not given, where they work, unless foreach is given.
    """

    name: str = "adamw_scale"
    lr: float | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.0
    kahan: bool | None = None
    foreach: bool | None = None
    fused: bool | None = None

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise ConfigError(
                f"optimizer.name: expected one of {', '.join(OPTIMIZERS)}, got {self.name!r}"
                f"{nearest(self.name, OPTIMIZERS)}"
            )
        if self.kahan is not None and self.name != "adamw_scale":
            raise ConfigError(f"optimizer.kahan is for adamw_scale, but optimizer.name is {self.name}; leave it out")
        try:
            check_settings(self.peak_lr, self.betas, self.eps, self.weight_decay, name="optimizer")
            check_form(self.foreach, self.fused, name="optimizer")
        except ValueError as error:
            raise ConfigError(str(error)) from None

    @property
    def peak_lr(self) -> float:
        """The learning rate after the warm-up: `lr`, or the default of the optimizer."""
        return _DEFAULT_LR[self.name] if self.lr is None else self.lr


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate schedule; every one starts with a linear warm-up.

    Attributes:
        name: cosine, wsd (warm up, stay, decay), inverse_sqrt or constant.
        warmup_steps: Optimizer steps of the warm-up.
        warmup_ratio: The warm-up as a share of the run, in place of warmup_steps; 0.05 if neither is given.
        decay_steps: Optimizer steps of the decay at the end; wsd only.
        decay_ratio: That decay as a share of the run, in place of decay_steps; 0.1 if neither is given. wsd only.
        decay_shape: Shape of that decay, 1-sqrt (if not given), linear or cosine; wsd only.
        min_lr_ratio: Where the learning rate ends, as a share of the peak; cosine and wsd only.
    """

    name: str = "cosine"
    warmup_steps: int | None = None
    warmup_ratio: float | None = None
    decay_steps: int | None = None
    decay_ratio: float | None = None
    decay_shape: str | None = None
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        has_decay = self.decay_steps is not None or self.decay_ratio is not None
        try:
            check_schedule(self.name, has_decay, self.min_lr_ratio, self.decay_shape)
        except ValueError as error:
            raise ConfigError(f"schedule: {error}") from None
        for phase in ("warmup", "decay"):
            steps, ratio = getattr(self, f"{phase}_steps"), getattr(self, f"{phase}_ratio")
            if steps is not None and ratio is not None:
                raise ConfigError(
                    f"schedule: expected {phase}_steps or {phase}_ratio, got both ({steps} and {ratio}); leave one out"
                )
            if steps is not None and steps < 0:
                raise ConfigError(f"schedule.{phase}_steps: expected 0 or more, got {steps}")
            if ratio is not None and not 0.0 <= ratio <= 1.0:
                raise ConfigError(f"schedule.{phase}_ratio: expected a share in [0, 1], got {ratio}")


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Return the optimizer that `config` describes over the model's trainable parameters.

    Args:
        model: Where its parameters lie decides whether the fused or foreach form is used.
        config: The settings.

    Raises:
        ConfigError: Fused kernels are asked for where they cannot run.
    """
    groups = parameter_groups(model, config.weight_decay)
    parameters = [parameter for group in groups for parameter in group["params"]]
    if config.name == "adamw_scale" and any(map(is_sharded, parameters)):
        if config.fused:
            raise ConfigError("optimizer.fused is true, but its kernels take no sharded parameters; leave it out")
        if config.foreach is False:
            raise ConfigError(
                "optimizer.foreach is false, but sharded parameters are updated many at a time; leave it out"
            )
        from fat5.optim.sharded import ShardedAdamWScale

        return ShardedAdamWScale(
            groups, config.peak_lr, config.betas, config.eps, config.weight_decay, config.kahan is not False
        )
    settings: dict[str, Any] = {
        "lr": config.peak_lr,
        "betas": config.betas,
        "eps": config.eps,
        "foreach": config.foreach,
    }
    fused = config.fused
    if config.name == "adamw_scale":
        reason = fused and (unavailable() or next(filter(None, map(refuses, parameters)), None))
        if reason:
            raise ConfigError(f"optimizer.fused is true, which does not work here: {reason}; leave it out")
        return AdamWScale(groups, kahan=config.kahan is not False, fused=fused, **settings)
    if fused is None and config.foreach is None and all(p.device.type in ("cpu", "cuda") for p in parameters):
        fused = True
    return torch.optim.AdamW(groups, fused=fused, **settings)


def is_sharded(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is spread over ranks, a DTensor."""
    return hasattr(parameter, "placements")


def build_schedule(optimizer: Optimizer, config: ScheduleConfig, num_training_steps: int) -> LambdaLR:
    """Return the schedule that `config` describes for a run of `num_training_steps` optimizer steps.

    Raises:
        ConfigError: Warm-up and decay do not fit into the run.
    """
    warmup = _steps(config.warmup_steps, config.warmup_ratio, num_training_steps)
    if warmup is None:
        warmup = int(_DEFAULT_WARMUP_RATIO * num_training_steps)
    try:
        return get_schedule(
            config.name,
            optimizer,
            num_warmup_steps=warmup,
            num_training_steps=num_training_steps,
            num_decay_steps=_steps(config.decay_steps, config.decay_ratio, num_training_steps),
            min_lr_ratio=config.min_lr_ratio,
            decay_shape=config.decay_shape,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _steps(steps: int | None, ratio: float | None, num_training_steps: int) -> int | None:
    """Return `steps`, or the whole steps in that share of the run: rounded down, so that shares of 1 in all fit."""
    return steps if ratio is None else int(ratio * num_training_steps + 1e-6)
