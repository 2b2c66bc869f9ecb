"""The fused kernel as a custom op: opaque to torch.compile, with a fake form. `layer` knows its gradient."""

from __future__ import annotations

from torch import Tensor

from fat5.ops.feed_forward.launch import run_forward
from fat5.ops.operators import operator

_NOT_KEPT = 0  # elements of the tensor that stands for a projection nobody keeps


def _fake(x, weight, tanh, keep):
    leading, width = x.shape[:-1], weight.shape[0] // 2
    return x.new_empty((*leading, 2 * width) if keep else (_NOT_KEPT,)), x.new_empty((*leading, width))


@operator("triton_feed_forward_inner", fake=_fake)
def triton_feed_forward_inner(x: Tensor, weight: Tensor, tanh: bool, keep: bool) -> tuple[Tensor, Tensor]:
    """Return the joined projection, empty where nobody keeps it, and the gated GELU of it."""
    joined, inner = run_forward(x, weight, tanh, keep)
    return x.new_empty(_NOT_KEPT) if joined is None else joined, inner
