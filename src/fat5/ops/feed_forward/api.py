"""The public gated feed-forward layer, with its checks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fat5.ops.activation.api import check_approximation, gated_gelu_linear, joined_gated_gelu
from fat5.ops.feed_forward.choice import LEAST_ROWS, card_can_fuse, fuses_by_default
from fat5.ops.feed_forward.tiles import TILE
from fat5.ops.kernels_or_torch import HAS_TRITON, takes_kernels

if HAS_TRITON:
    from fat5.ops.feed_forward.custom_ops import triton_feed_forward_inner
    from fat5.ops.feed_forward.layer import GatedFeedForward

_DEPTH = 8  # of x's width: 16 bytes, of which the strides of a description are multiples


def gated_feed_forward(
    x: Tensor,
    joined_weight: Tensor,
    out_weight: Tensor,
    *,
    approximate: str = "tanh",
    keep_inner: bool = False,
    backend: str = "auto",
    fused: bool | None = None,
) -> Tensor:
    """T5 v1.1's feed-forward layer: `linear(gelu(gate) * up, out_weight)`, gate and up being halves of one projection.

    Fused, one kernel makes the projection and the activation, from the float32 sums of a matrix product that are still
    in registers; the activation's own kernel would read the projection again. The projection is rounded before the
    activation is taken, as a product would leave it, so that the results differ by the order of sums alone.

    Args:
        x: [..., E].
        joined_weight: [2 D, E], the gate's rows in front of the other's; type and device of x.
        out_weight: [any, D], likewise.
        approximate: As in `gated_gelu`.
        keep_inner: Keep what the activation returns for the backward, D values a token. By default the kernel of its
            gradient makes it again, as in `gated_gelu_linear`.
        backend: As in `gated_gelu`.
        fused: Take the fused kernel where it runs: on Hopper cards, in bfloat16 and float16, where 64 divides D and 8
            divides E. By default only for many tokens, and unless the environment has `FAT5_FEED_FORWARD=0`.

    Returns:
        [..., any]. Under autocast all inputs are cast to autocast's type at the door.

    Raises:
        ValueError: As `gated_gelu_linear`, or weights that do not fit.

    Reference: Shazeer, GLU variants improve Transformer, arXiv:2002.05202.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, joined_weight, out_weight = x.to(dtype), joined_weight.to(dtype), out_weight.to(dtype)
    _check(x, joined_weight, out_weight)
    check_approximation("gated_feed_forward", approximate)
    if takes_kernels("gated_feed_forward", backend, x) and _fuses(x, joined_weight, fused):
        if torch.is_grad_enabled() and any(t.requires_grad for t in (x, joined_weight, out_weight)):
            return GatedFeedForward.apply(x, joined_weight, out_weight, approximate == "tanh", keep_inner)
        _, inner = triton_feed_forward_inner(x, joined_weight, approximate == "tanh", False)
        return F.linear(inner, out_weight)
    joined = F.linear(x, joined_weight)
    if keep_inner:
        return F.linear(joined_gated_gelu(joined, approximate=approximate, backend=backend), out_weight)
    return gated_gelu_linear(joined, out_weight, approximate=approximate, backend=backend)


def _fuses(x: Tensor, joined_weight: Tensor, asked: bool | None) -> bool:
    """Return whether the fused kernel is to run."""
    double_width, depth = joined_weight.shape
    if asked is False or x.numel() == 0 or double_width % (2 * TILE.columns) or depth % _DEPTH:
        return False
    if x.is_cuda and (x.element_size() != 2 or not card_can_fuse()):
        return False
    return bool(asked) or (x.is_cuda and fuses_by_default() and x.numel() >= LEAST_ROWS * depth)


def _check(x: Tensor, joined_weight: Tensor, out_weight: Tensor) -> None:
    weights = (joined_weight, out_weight)
    fits = x.ndim > 0 and x.is_floating_point() and all(w.ndim == 2 for w in weights)
    fits = fits and joined_weight.shape[1] == x.shape[-1] and joined_weight.shape[0] == 2 * out_weight.shape[1]
    if not fits or any(w.dtype != x.dtype or w.device != x.device for w in weights):
        got = " and ".join(f"{list(w.shape)} {w.dtype} on {w.device}" for w in weights)
        raise ValueError(
            "gated_feed_forward: expected x [..., E] and weights [2 D, E] and [any, D] of one floating type on one "
            f"device, got x {list(x.shape)} {x.dtype} on {x.device} and weights {got}"
        )
