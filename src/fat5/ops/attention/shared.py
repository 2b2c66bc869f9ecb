"""`shared_attention`: attention of one layer on a projection that holds keys and values of many layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fat5.ops.attention.api import autocast, op_arguments
from fat5.ops.attention.backends import choose_backend
from fat5.ops.attention.shared_ops import layer_parts


def shared_attention(
    shared: Tensor, link: Tensor, q: Tensor, *, layer: int, first: int, backend: str = "auto", **options: Any
) -> tuple[Tensor, Tensor]:
    """`flash_attention` of one of the layers whose keys and values one matrix product made, with one gradient for it.

    Layers are called in their order, each at most once, and each is given what the one before returned. In the backward
    each writes the gradients of its keys and values where they belong in one tensor, which nobody clears, adds up or
    copies. The kernels read keys and values where they lie.

    Args:
        shared: Keys and values of all layers, [B, Lk, layers, 2, H, D], or packed [total_k, layers, 2, H, D].
        link: What the layer before returned, or `shared` for the first one: by it alone the gradient goes back.
        q: [B, Lq, H, D], or packed [total_q, H, D].
        layer: Which layer.
        first: The layer behind the one that returned `link`, or 0: `layer`, where no layer is left out.
        backend: See `flash_attention`.
        **options: All other options of `flash_attention`.

    Returns:
        The output, shaped and typed as the queries, and the link for the next layer.

    Raises:
        ValueError: As `flash_attention`, or other keys and values than expected.
        RuntimeError: In a backward pass that is to be differentiated itself.
    """
    if shared.ndim < 5 or shared.shape[-3] != 2 or not 0 <= first <= layer < shared.shape[-4]:
        raise ValueError(
            f"got keys and values {list(shared.shape)} for layer {layer} behind {first}; expected those of all layers, "
            "[..., length, layers, 2, heads, head_dim], and layers in their order"
        )
    q = autocast(q)
    k, v = layer_parts(shared, layer)
    if options.get("softmax_scale", 1.0) < 0:  # the kernels take the maximum before the scale
        q, options = -q, options | {"softmax_scale": -options["softmax_scale"]}
    arguments = op_arguments(q, k, v, **options)
    out, _, link = choose_backend(backend, q, keys="shared")(shared, link, q, layer, first, *arguments)
    return out, link
