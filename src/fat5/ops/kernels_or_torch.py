"""Which backend an operator takes where it has two: plain PyTorch anywhere, Triton kernels on a GPU."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from fat5.errors import nearest
from fat5.ops.attention.backends import triton_unavailable

NAMES = ("auto", "torch", "triton")
KERNEL_TYPES = (torch.bfloat16, torch.float16, torch.float32)

HAS_TRITON = importlib.util.find_spec("triton") is not None
_INTERPRETED = False

if HAS_TRITON:
    import triton

    _INTERPRETED = bool(triton.knobs.runtime.interpret)


def takes_kernels(function: str, backend: str, *tensors: Tensor, refusal: str | None = None) -> bool:
    """Return True if the operator's Triton kernels are to run on these tensors, False for plain PyTorch.

    Args:
        function: Name of the public function, for the error.
        backend: A name in `NAMES`; "auto" takes the kernels where the tensors are on a GPU that they run on.
        tensors: The operator's floating inputs, on one device.
        refusal: Why the kernels cannot take the shapes, or None.

    Raises:
        ValueError: An unknown name, or "triton" where it does not work.
    """
    if backend == "torch" or (backend == "auto" and not tensors[0].is_cuda):
        return False
    if backend not in NAMES:
        expected = ", ".join(map(repr, NAMES))
        raise ValueError(f"{function}: got backend={backend!r}; expected one of {expected}{nearest(backend, NAMES)}")
    reason = refusal
    odd = [x.dtype for x in tensors if x.dtype not in KERNEL_TYPES]
    if odd:
        reason = f"its kernels take bfloat16, float16 and float32, not {odd[0]}"
    elif not tensors[0].is_cuda and not (_INTERPRETED and backend == "triton"):
        reason = f"the tensors are on {tensors[0].device}"
    reason = _unavailable() or reason
    if reason is not None and backend == "triton":
        raise ValueError(f"{function}: got backend='triton', which does not work here: {reason}; use 'auto' or 'torch'")
    return reason is None


_reasons: list[str | None] = []


@torch.compiler.assume_constant_result
def _unavailable() -> str | None:
    if not _reasons:
        _reasons.append(triton_unavailable())
    return _reasons[0]
