"""Attention of one query a row by PyTorch's own, for steps of decoding on a CPU.

Scores are so few there that blocks, and what a backward would need, cost more than the arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fat5.ops.attention.problem import Problem, accumulation_dtype


def attend_one_query(problem: Problem) -> Tensor | None:
    """Return the output, shaped and typed as q, without gradients, or None where a problem is another.

    It takes padded batches on a CPU whose keys are all seen, or hidden by a dense bias alone, without dropout.
    """
    q, num_keys = problem.q, problem.k.shape[1]
    if problem.packed or q.shape[1] != 1 or num_keys == 0 or q.device.type != "cpu" or problem.dropout_p > 0:
        return None
    if problem.bias_kind not in ("none", "dense") or problem.offset is None:
        return None
    bounded = problem.key_starts is not None or problem.key_lengths is not None
    if bounded or (problem.causal and problem.offset < num_keys - 1):
        return None
    dtype = accumulation_dtype(q.dtype)
    queries, keys, values = (_typed(x.transpose(1, 2), dtype) for x in (q, problem.k, problem.v))
    bias = None if problem.bias is None else _typed(problem.bias, dtype)
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=problem.softmax_scale)
    return _typed(out.transpose(1, 2), q.dtype)


def _typed(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)
