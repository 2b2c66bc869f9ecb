"""Learning rate schedules: PyTorch's LambdaLR with the curves of Transformers, checked and under one name each."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers.optimization import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_inverse_sqrt_schedule,
    get_wsd_schedule,
)

from fat5.errors import nearest

SCHEDULES = ("cosine", "wsd", "inverse_sqrt", "constant")
DECAY_SHAPES = ("1-sqrt", "linear", "cosine")
WITH_FLOOR = ("cosine", "wsd")


def get_schedule(
    name: str,
    optimizer: Optimizer,
    *,
    num_warmup_steps: int,
    num_training_steps: int,
    num_decay_steps: int | None = None,
    min_lr_ratio: float = 0.0,
    decay_shape: str | None = None,
) -> LambdaLR:
    """Return a schedule that multiplies the optimizer's learning rate; call its `step()` after each optimizer step.

    Every schedule warms up in a line over `num_warmup_steps`, from 0 ("wsd": from the floor). Then, with t the share
    of what follows that is done:

    - "cosine": falls as (1 + cos(pi t)) / 2 to the floor at `num_training_steps`;
    - "wsd": stays at the peak, and falls over the last `num_decay_steps` to the floor, as 1 - sqrt(t) or as
      `decay_shape` says;
    - "inverse_sqrt": falls as sqrt(warm-up / step), without warm-up as sqrt(10,000 / (step + 10,000)), whatever the
      length;
    - "constant": stays at the peak.

    The state dict holds the step and the peak but not the curve: a resumed run continues where it was, and may be
    given a new length.

    Args:
        name: One of "cosine", "wsd", "inverse_sqrt", "constant".
        optimizer: Its groups' `lr` is the peak.
        num_warmup_steps: Steps of the warm-up, 0 for none.
        num_training_steps: Optimizer steps of the whole run.
        num_decay_steps: Steps of the last phase of "wsd", a tenth of the run if None; only for "wsd".
        min_lr_ratio: The floor as a share of the peak, in [0, 1]; only for "cosine" and "wsd".
        decay_shape: "1-sqrt" (the default), "linear" or "cosine"; only for "wsd".

    Raises:
        ValueError: An unknown name, a number out of range, or an argument that the schedule does not use.

    References: Loshchilov and Hutter, arXiv:1608.03983 (cosine); Hu et al., arXiv:2404.06395 (WSD); Hägele et al.,
    arXiv:2405.18392 (1 - sqrt); Raffel et al., arXiv:1910.10683 (inverse square root).
    """
    check_schedule(name, num_decay_steps is not None, min_lr_ratio, decay_shape)
    if num_training_steps < 1:
        raise ValueError(f"schedule {name}: expected num_training_steps >= 1, got {num_training_steps}")
    if not 0 <= num_warmup_steps <= num_training_steps:
        raise ValueError(
            f"schedule {name}: expected num_warmup_steps in [0, {num_training_steps}], the number of training steps, "
            f"got {num_warmup_steps}"
        )
    if name == "constant":
        return get_constant_schedule_with_warmup(optimizer, num_warmup_steps)
    if name == "inverse_sqrt":
        return get_inverse_sqrt_schedule(optimizer, num_warmup_steps)
    if name == "cosine":
        return get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, num_warmup_steps, num_training_steps, min_lr_rate=min_lr_ratio
        )
    if num_decay_steps is None:
        num_decay_steps = min(-(-num_training_steps // 10), num_training_steps - num_warmup_steps)
    if not 0 <= num_decay_steps <= num_training_steps - num_warmup_steps:
        raise ValueError(
            f"schedule wsd: expected num_decay_steps in [0, {num_training_steps - num_warmup_steps}], "
            f"the {num_training_steps} training steps less {num_warmup_steps} of warm-up, got {num_decay_steps}"
        )
    return get_wsd_schedule(
        optimizer,
        num_warmup_steps,
        num_decay_steps,
        num_training_steps=num_training_steps,
        decay_type=decay_shape or DECAY_SHAPES[0],
        min_lr_ratio=min_lr_ratio,
    )


def check_schedule(name: str, has_decay: bool, min_lr_ratio: float, decay_shape: str | None) -> None:
    """Raise ValueError on an unknown name or shape, a floor out of range, or a setting the schedule does not use."""
    if name not in SCHEDULES:
        raise ValueError(f"expected a schedule among {', '.join(SCHEDULES)}, got {name!r}{nearest(name, SCHEDULES)}")
    if decay_shape is not None and decay_shape not in DECAY_SHAPES:
        raise ValueError(
            f"expected decay_shape to be one of {', '.join(DECAY_SHAPES)}, "
            f"got {decay_shape!r}{nearest(decay_shape, DECAY_SHAPES)}"
        )
    if not 0.0 <= min_lr_ratio <= 1.0:
        raise ValueError(f"expected min_lr_ratio in [0, 1], got {min_lr_ratio}")
    if name != "wsd" and (has_decay or decay_shape is not None):
        raise ValueError(f"schedule {name} has no decay phase of its own: decay steps and shape are for wsd")
    if name not in WITH_FLOOR and min_lr_ratio:
        raise ValueError(f"schedule {name} has no floor: expected min_lr_ratio 0, got {min_lr_ratio}")
