"""`step_attention`: the attention of one query a row to a cache on fixed addresses."""

from __future__ import annotations

import torch
from torch import Tensor

from fat5.ops.attention.api import flash_attention
from fat5.ops.attention.backends import MAX_HEAD_DIM
from fat5.ops.attention.bias import DistanceBias
from fat5.ops.kernels_or_torch import HAS_TRITON, takes_kernels

if HAS_TRITON:
    from fat5.ops.step.attention_launch import run_attention


def step_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    new: tuple[Tensor, Tensor] | None = None,
    positions: Tensor | None = None,
    table: Tensor | None = None,
    key_starts: Tensor | None = None,
    key_lengths: Tensor | None = None,
    softmax_scale: float = 1.0,
    backend: str = "auto",
) -> Tensor:
    """Attend with one query a row, after storing its own key and value, in one kernel.

    The result is that of `flash_attention` with `causal=True` and `query_offset=positions`, or without both in
    cross-attention. No gradients. For a step that is a CUDA graph: all that changes from step to step is on the device.

    Args:
        q: [B, H, D].
        keys: [B, N, H, D], with free slots behind the keys; changed in place where `new` is given.
        values: Shaped as keys.
        new: Self-attention: the query's own key and value, [B, H, D] each, to be stored in slot `positions` of
            each row.
        positions: Self-attention: int64 [B], how many keys are in the cache.
        table: Self-attention: bias by distance, float32 [H, 2R + 1], as `DistanceBias` has it; or None.
        key_starts: int64 [B], first real key of each row; by default 0.
        key_lengths: int64 [B], real keys from there on; by default all.
        softmax_scale: Factor of the scores.
        backend: "auto", "torch", or "triton" for the kernel, on a GPU.

    Returns:
        [B, H, D], type of q.

    Raises:
        ValueError: Shapes that do not fit, or an unknown backend or one that does not work.
    """
    shape = (keys.shape[0], *keys.shape[2:])
    alike = q.shape == shape and values.shape == keys.shape and all(t.shape == shape for t in new or ())
    if keys.ndim != 4 or not alike or (new is None) != (positions is None) or (table is not None and new is None):
        given = {"q": q, "keys": keys, "values": values, **dict(zip(("new k", "new v"), new or (), strict=False))}
        shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in given.items())
        raise ValueError(
            f"step_attention: got {shapes}; expected keys and values [B, N, H, D], all others [B, H, D], and new, "
            "positions and table together or not at all (a table may be missing)"
        )
    refusal = None if shape[-1] <= MAX_HEAD_DIM else f"its kernel takes head dimensions up to {MAX_HEAD_DIM}"
    if takes_kernels("step_attention", backend, q, keys, values, refusal=refusal):
        return run_attention(q, keys, values, new, positions, table, key_starts, key_lengths, softmax_scale)
    if new is not None and positions is not None:
        rows = torch.arange(len(q), device=q.device)
        for kept, tensor in zip((keys, values), new, strict=True):
            kept.index_put_((rows, positions), tensor)
    out = flash_attention(
        q[:, None],
        keys,
        values,
        bias=None if table is None else DistanceBias(table),
        causal=new is not None,
        query_offset=positions,
        key_starts=key_starts,
        key_lengths=key_lengths,
        softmax_scale=softmax_scale,
        backend="torch",
    )
    return out[:, 0]
