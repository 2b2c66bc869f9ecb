"""What the tests of attention let pass in the gradient of T5's table."""

from __future__ import annotations

import torch
from torch import Tensor


def table_rounding(kind: str, out: Tensor, weights: Tensor, gradient: Tensor) -> float:
    """What rounding the output alone does to the gradient of T5's table, relative to it; one standard deviation.

    The backward has a row's sum of P dP as that of dO O, with O as it was stored: off by up to eps |O| / 2 an element,
    evenly spread, eps |O| / sqrt(12) on average. A far bucket that holds most keys takes that error whole, since P sums
    to 1 over a row, and its gradient is small: the rest of a row, whose gradients sum to 0. Plain PyTorch's P dP has
    no stored output in it.
    """
    if kind != "relative":
        return 0.0
    return float(torch.finfo(out.dtype).eps / 12**0.5 * (weights * out.detach()).double().norm() / gradient.norm())
