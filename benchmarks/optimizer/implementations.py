"""The optimizers of the case, each with the bytes that its step must move."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.optimizer.workload import MAX_NORM
from fat5.optim import AdamWScale, fused_update
from fat5.optim.fused_update import Launch, unavailable

LR = 5e-3


@dataclass(frozen=True)
class Implementation:
    """An optimizer.

    Attributes:
        make: Makes it for groups of parameters.
        compensated: Keeps what the rounding of bf16 parameters left over.
        state_types: Types of the tensors that a step reads and writes beside a parameter, in bytes; None is the
            parameter's own.
        reads: Bytes of a parameter that are read once more, as for its RMS; in sizes of the parameter.
        clips_in_step: Reads the gradients for their norm and no more; else they are multiplied before the step.
        on_gpu: Needs one.
        by_name: Only when named.
    """

    make: Callable[[list[dict[str, Any]]], Optimizer]
    compensated: bool = False
    state_types: tuple[int | None, ...] = (None, None)
    reads: int = 0
    clips_in_step: bool = False
    on_gpu: bool = False
    by_name: bool = False

    def bytes_of(self, numel: int, itemsize: int, *, clip: bool) -> int:
        """Return the bytes that a step over `numel` numbers must read and write."""
        low = itemsize < 4
        state = sum(size or itemsize for size in self.state_types) + (itemsize if self.compensated and low else 0)
        step = 2 * (itemsize + state) + itemsize + self.reads * itemsize  # parameter and state, gradient, RMS
        clipping = itemsize if self.clips_in_step else 3 * itemsize  # its norm; and the gradient read and written
        return numel * (step + (clipping if clip else 0))


def clip(optimizer: Optimizer) -> Tensor:
    """Clip as a training loop with this optimizer does, and return the norm."""
    if isinstance(optimizer, AdamWScale):
        return optimizer.clip_grad_norm(MAX_NORM)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)


def _adamw_scale(groups: list[dict[str, Any]], **form: Any) -> Optimizer:
    return AdamWScale(groups, lr=LR, **form)


def _adamw(groups: list[dict[str, Any]], **form: Any) -> Optimizer:
    return torch.optim.AdamW(groups, lr=LR, **form)


def _adafactor(groups: list[dict[str, Any]]) -> Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(groups, lr=LR, relative_step=False, scale_parameter=True)


def launched_as(launch: Launch) -> Implementation:
    """Return the fused form with blocks of another size, to find the best."""

    def make(groups: list[dict[str, Any]]) -> Optimizer:
        usual, fused_update.LAUNCH = fused_update.LAUNCH, launch
        try:
            return _adamw_scale(groups, fused=True)
        finally:
            fused_update.LAUNCH = usual

    return Implementation(make, **_SCALE, on_gpu=True)


def unavailable_here(implementation: Implementation) -> str | None:
    """Return why an implementation cannot run here, or None."""
    return unavailable() if implementation.on_gpu else None


_SCALE: dict[str, Any] = {"compensated": True, "state_types": (None, 4), "reads": 1, "clips_in_step": True}
IMPLEMENTATIONS = {
    "fat5-fused": Implementation(functools.partial(_adamw_scale, fused=True), **_SCALE, on_gpu=True),
    "fat5-foreach": Implementation(functools.partial(_adamw_scale, foreach=True), **_SCALE),
    "adamw-fused": Implementation(functools.partial(_adamw, fused=True)),
    "adamw-foreach": Implementation(functools.partial(_adamw, foreach=True)),
    # Its second moment is a row and a column; what it reads and writes in passing is not counted.
    "adafactor": Implementation(_adafactor, state_types=(), reads=1, by_name=True),
}
"""By name. PyTorch's AdamW neither scales nor compensates; Transformers' Adafactor scales."""

SWEEP = [
    Launch(block, 16_384 // block, warps)
    for block, warps in ((512, 2), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8), (4096, 16), (8192, 16))
] + [Launch(2048, blocks, 8) for blocks in (2, 4, 16)]
"""What `--sweep` tries."""
