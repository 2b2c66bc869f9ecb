"""`joined_attention`: attention on a projection that holds q, k and v, or k and v, side by side."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fat5.ops.attention.api import autocast, flash_attention, op_arguments
from fat5.ops.attention.backends import choose_backend
from fat5.ops.attention.joined_ops import joined_parts


def joined_attention(joined: Tensor, q: Tensor | None = None, *, backend: str = "auto", **options: Any) -> Tensor:
    """`flash_attention` of q, k and v that one matrix product made, with one gradient for that product.

    The kernels read q, k and v where they lie, and write their gradients side by side: the backward of the projection
    is then one product too, and nobody adds up or moves three gradients.

    Args:
        joined: Self-attention: q, k and v, [B, L, 3, H, D], or packed [total, 3, H, D]. With `q`: k and v,
            [B, Lk, 2, H, D], or packed [total_k, 2, H, D].
        q: Cross-attention: [B, Lq, H, D], or packed [total_q, H, D].
        backend: See `flash_attention`.
        **options: All other options of `flash_attention`.

    Returns:
        Shaped and typed as the queries.

    Raises:
        ValueError: As `flash_attention`, or another number of parts.
    """
    parts = 3 if q is None else 2
    if joined.ndim < 4 or joined.shape[-3] != parts:
        names = "q, k and v: [..., length, 3, heads, head_dim]"
        names = names if q is None else "k and v: [..., length, 2, heads, head_dim]"
        raise ValueError(f"got a joined projection {list(joined.shape)}; expected {names}")
    joined, q = autocast(joined), q if q is None else autocast(q)
    slices = joined_parts(joined, q)
    if options.get("softmax_scale", 1.0) < 0:
        return flash_attention(*slices, backend=backend, **options)
    arguments = op_arguments(*slices, **options)
    out, _ = choose_backend(backend, slices[0], keys="joined")(joined, q, *arguments)
    return out
