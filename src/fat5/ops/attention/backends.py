"""The backends of attention: which exist, which work here, and which one to take."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from fat5.errors import nearest
from fat5.ops.attention import torch_backend
from fat5.ops.attention.custom_ops import define_ops
from fat5.ops.attention.hopper.support import takes_tensors
from fat5.ops.attention.joined_ops import define_joined_ops
from fat5.ops.attention.plan_ops import define_plan_op
from fat5.ops.attention.shared_ops import define_shared_ops

HOPPER_SWITCH = "FAT5_HOPPER"
"""Environment variable: with 0 "auto" does not take the backend `hopper`."""

MIN_CAPABILITY = (8, 0)
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256

torch_attention, torch_attention_backward = define_ops("torch", torch_backend.run_forward, torch_backend.run_backward)
torch_joined, torch_joined_backward = define_joined_ops("torch", torch_backend.run_forward, torch_backend.run_backward)
torch_shared, torch_shared_backward = define_shared_ops("torch", torch_backend.run_forward, torch_backend.run_backward)
_OPS: dict[str, Any] = {"torch": torch_attention}
_JOINED_OPS: dict[str, Any] = {"torch": torch_joined}
_SHARED_OPS: dict[str, Any] = {"torch": torch_shared}
_PLAN_OPS: dict[str, Any] = {"torch": None}
_INTERPRETED = False

if importlib.util.find_spec("triton") is not None:
    import triton

    from fat5.ops.attention import launch
    from fat5.ops.attention.hopper import dispatch as hopper

    _INTERPRETED = bool(triton.knobs.runtime.interpret)
    triton_attention, triton_attention_backward = define_ops("triton", launch.run_forward, launch.run_backward)
    hopper_attention, hopper_attention_backward = define_ops("hopper", hopper.run_forward, hopper.run_backward)
    triton_joined, triton_joined_backward = define_joined_ops("triton", launch.run_forward, launch.run_backward)
    hopper_joined, hopper_joined_backward = define_joined_ops("hopper", hopper.run_forward, hopper.run_backward)
    triton_shared, triton_shared_backward = define_shared_ops("triton", launch.run_forward, launch.run_backward)
    hopper_shared, hopper_shared_backward = define_shared_ops("hopper", hopper.run_forward, hopper.run_backward)
    _OPS |= {"triton": triton_attention, "hopper": hopper_attention}
    _JOINED_OPS |= {"triton": triton_joined, "hopper": hopper_joined}
    _SHARED_OPS |= {"triton": triton_shared, "hopper": hopper_shared}
    _PLAN_OPS |= {"triton": None, "hopper": define_plan_op("hopper", hopper.make_plan, hopper.plan_size)}


def _torch_unavailable() -> str | None:
    return None


def triton_unavailable() -> str | None:
    """Return why the Triton kernels run on no tensor here, or None."""
    if "triton" not in _OPS:
        return "the package triton is not installed"
    if _INTERPRETED:
        return None
    if not torch.cuda.is_available():
        return "there is no CUDA GPU"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        found, least = (".".join(map(str, c)) for c in (capability, MIN_CAPABILITY))
        return f"the GPU's compute capability is {found}; the kernels need {least} (Ampere) or later"
    return None


def _hopper_unavailable() -> str | None:
    reason = triton_unavailable()
    if reason is not None:
        return reason
    if _INTERPRETED:
        return "its language, Gluon, has no interpreter"
    return hopper.unavailable()


BACKENDS: dict[str, Callable[[], str | None]] = {
    "torch": _torch_unavailable,
    "triton": triton_unavailable,
    "hopper": _hopper_unavailable,
}
"""Backends by name, each with a function that returns None where the backend works, else the reason why not.

`hopper` has kernels for some inputs, and runs the kernels of `triton` for all others.
"""


def _triton_refuses(q: Tensor) -> str | None:
    """Return why the triton backend cannot take these queries, or None if it can."""
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"its kernels take bfloat16, float16 and float32, not {q.dtype}"
    if not MIN_HEAD_DIM <= q.shape[-1] <= MAX_HEAD_DIM:
        return f"its kernels take head dimensions from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, not {q.shape[-1]}"
    if not q.is_cuda and not _INTERPRETED:
        return f"the tensors are on {q.device}"
    return None


def choose_backend(name: str, q: Tensor, *, keys: Literal["apart", "joined", "shared", "planned"] = "apart") -> Any:
    """Return the custom op of the backend for these queries.

    Args:
        name: The backend, or "auto".
        q: The queries.
        keys: Where keys and values lie: in tensors of their own, in a joined projection, or in one of all layers. Or
            "planned": the op that makes plans for all these, None where the backend has no plans.

    Raises:
        ValueError: An unknown name, or a backend asked for by name that does not work here or for these inputs.
    """
    ops = {"apart": _OPS, "joined": _JOINED_OPS, "shared": _SHARED_OPS, "planned": _PLAN_OPS}[keys]
    if name == "torch":
        return ops["torch"]
    if name == "auto":
        if not q.is_cuda or _cached_reason("triton") is not None or _triton_refuses(q) is not None:
            return ops["torch"]
        faster = hopper_by_default() and _cached_reason("hopper") is None and takes_tensors(q)
        return ops["hopper" if faster else "triton"]
    if name not in BACKENDS:
        raise ValueError(f"got backend={name!r}; expected 'auto' or one of {sorted(BACKENDS)}{nearest(name, BACKENDS)}")
    reason = _cached_reason(name) or _triton_refuses(q)
    if reason is not None:
        raise ValueError(f"got backend={name!r}, which does not work here: {reason}; use 'auto' or 'torch'")
    return ops[name]


@torch.compiler.assume_constant_result
def hopper_by_default() -> bool:
    """Return whether "auto" may take the backend `hopper`."""
    return os.environ.get(HOPPER_SWITCH) != "0"


_reasons: dict[str, str | None] = {}


@torch.compiler.assume_constant_result
def _cached_reason(name: str) -> str | None:
    if name not in _reasons:
        _reasons[name] = BACKENDS[name]()
    return _reasons[name]
