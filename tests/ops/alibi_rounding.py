"""What float32 itself loses in ALiBi's gradients at long distances, beyond the rounding of plain attention."""

import torch
from torch import Tensor

from fat5.ops import DenseBias
from fat5.ops.attention.reference import attention_reference

_EPS = torch.finfo(torch.float32).eps


def exponent_rounding(slopes: Tensor, num_queries: int, num_keys: int) -> float:
    """Return the relative error of a weight whose exponent, as large as the bias, is rounded three times: the bias, its
    sum with the product, and that sum in base 2."""
    return 3 * 0.5 * _EPS * float(slopes.detach().abs().max()) * max(num_queries, num_keys)


def slope_rounding(leaves: list[Tensor], weights: Tensor, causal: bool, signed: bool, softmax_scale: float) -> float:
    """Return the norm over heads of `eps * sum |t| + rounding * norm(t)` with the terms t = dS * distance.

    A slope's gradient is a sum that all but cancels, so its error is measured by the terms and not by what they leave;
    each carries its weight's own `exponent_rounding`, in one direction or the other.
    """
    q, k, v, slopes = (x.detach().double() for x in leaves)
    distance = torch.arange(k.shape[1], device=q.device) - torch.arange(q.shape[1], device=q.device)[:, None]
    distance = (distance - (k.shape[1] - q.shape[1])).double()
    factor = distance if signed else -distance.abs()
    dense = (slopes[:, None, None] * factor)[None].requires_grad_()
    out = attention_reference(q, k, v, bias=DenseBias(dense), causal=causal, softmax_scale=softmax_scale)
    (grad,) = torch.autograd.grad(out, dense, weights.double())
    terms = (grad[0] * factor).flatten(1)
    each = exponent_rounding(slopes, q.shape[1], k.shape[1])
    return float((_EPS * terms.abs().sum(1) + each * terms.norm(dim=1)).norm())
