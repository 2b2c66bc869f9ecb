"""Programmatic dependent launch: a kernel that starts while the one before it in the stream still ends.

A launch behind another one costs some two microseconds during which the card is empty. On Hopper and later a kernel may
instead be placed on the card as soon as every program of the kernel before it has called `gdc_launch_dependents`, or
has ended. Three rules keep the pair correct:

1. The follower is launched with `follower_options(device)`, and each of its programs calls `gdc_wait()` before its
   first access to memory that an earlier kernel writes, and before its own first store. The call returns once the
   kernel before has ended and its stores are visible; nothing shorter does.
2. Every program of the leader calls `gdc_launch_dependents()` on every path, once its loads are under way: a hint about
   time alone, which says nothing about its stores.
3. Kernels after the follower are launched as ever, and wait for it as ever. What is launched between the two takes the
   overlap away, not the order.

Kernels make both calls under a constant that their launch sets from `dependent_launch`, since Triton's interpreter and
other cards have neither.
"""

from __future__ import annotations

import functools

import torch
import triton

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    gdc_launch_dependents = gdc_wait = None

__all__ = ["capability", "dependent_launch", "follower_options", "gdc_launch_dependents", "gdc_wait"]

MIN_CAPABILITY = (9, 0)
OPTION = "launch_pdl"


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device, which PyTorch looks up at each call."""
    return torch.cuda.get_device_capability(device)


def dependent_launch(device: torch.device) -> bool:
    """Return whether kernels on this device can overlap: CUDA from Hopper on, compiled, with a Triton that has it."""
    if device.type != "cuda" or torch.version.hip is not None or triton.knobs.runtime.interpret or not _triton_has_it():
        return False
    return capability(device) >= MIN_CAPABILITY


def follower_options(device: torch.device) -> dict[str, bool]:
    """Return what a follower's launch passes to Triton: nothing where kernels cannot overlap."""
    return {OPTION: True} if dependent_launch(device) else {}


@functools.cache
def _triton_has_it() -> bool:
    if gdc_wait is None or gdc_launch_dependents is None:
        return False
    try:
        from triton.backends.nvidia.compiler import CUDAOptions
    except ImportError:
        return False
    return OPTION in CUDAOptions.__dataclass_fields__
