"""The backends of the losses: their operators by name, and which one to take."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from fat5.ops.kernels_or_torch import takes_kernels
from fat5.ops.loss import from_hidden, from_logits
from fat5.ops.loss.custom_ops import HiddenOps, define_hidden_ops, define_logits_ops

_CPU_CHUNK_BYTES = 2**24


class LossBackend(NamedTuple):
    """The operators of one backend.

    Attributes:
        rows: Losses of the rows of given logits, differentiable.
        rows_backward: Its gradient.
        hidden: Losses from hidden states.
        device_chunk_bytes: Most bytes of working logits, where the user says nothing, on anything but a CPU.
        reduced: Loss of given logits as a scalar, whose gradient the forward stores; None if it cannot.
    """

    rows: Any
    rows_backward: Any
    hidden: HiddenOps
    device_chunk_bytes: int
    reduced: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] | None = None

    def chunk_bytes(self, labels: Tensor, asked: int | None) -> int:
        """Return the most bytes of working logits at a time."""
        if asked is not None:
            return asked
        return _CPU_CHUNK_BYTES if labels.device.type == "cpu" else self.device_chunk_bytes


TORCH = LossBackend(
    *define_logits_ops("torch", from_logits.run_rows, from_logits.run_rows_backward),
    define_hidden_ops(
        "torch", from_hidden.run_sum, from_hidden.run_rows, from_hidden.run_rows_backward, from_hidden.run_scale
    ),
    device_chunk_bytes=2**30,
)
BACKENDS: dict[str, LossBackend] = {"torch": TORCH}

if importlib.util.find_spec("triton") is not None:
    from fat5.ops.loss import triton_backend, with_gradient

    BACKENDS["triton"] = LossBackend(
        triton_backend.rows_op,
        triton_backend.rows_backward_op,
        triton_backend.hidden_ops,
        device_chunk_bytes=2**28,
        reduced=with_gradient.reduced_cross_entropy,
    )


def choose_backend(function: str, name: str, *tensors: Tensor) -> LossBackend:
    """Return the backend for these floating inputs of a public function.

    Raises:
        ValueError: An unknown name, or a backend asked for by name that does not work here or for these inputs.
    """
    return BACKENDS["triton"] if takes_kernels(function, name, *tensors) else TORCH
