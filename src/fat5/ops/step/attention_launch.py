"""Launching the kernel of attention of one query a row to a cache."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fat5.ops.dependent_launch import dependent_launch, follower_options
from fat5.ops.launching import on_device
from fat5.ops.step.attention_kernel import attention_kernel

_TILE_BYTES = 32_768
"""Of the keys of a tile, and as many of its values: with two tiles on their way 128 KB a program."""

_WARP_BYTES = 4_096  # 32 registers a thread for each of the four tensors
_MIN_KEYS, _MAX_KEYS = 16, 256


def tile(num_keys: int, block_d: int, itemsize: int) -> tuple[int, int]:
    """Return the keys of a tile, and its warps: all keys in two tiles, or as many as the registers hold."""
    most = min(_MAX_KEYS, _TILE_BYTES // (block_d * itemsize))
    keys = max(_MIN_KEYS, min(most, triton.next_power_of_2(triton.cdiv(num_keys, 2))))
    return keys, max(1, min(8, keys * block_d * itemsize // _WARP_BYTES))


def run_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    new: tuple[Tensor, Tensor] | None,
    positions: Tensor | None,
    table: Tensor | None,
    key_starts: Tensor | None,
    key_lengths: Tensor | None,
    softmax_scale: float,
) -> Tensor:
    """Return the output; see `step_attention`."""
    batch, num_keys, heads, dim = keys.shape
    out = torch.empty(batch, heads, dim, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    q = q if q.stride(2) == 1 else q.contiguous()
    new_k, new_v = (None, None) if new is None else new
    if new_k is not None and new_v is not None and (new_k.stride() != new_v.stride() or new_k.stride(2) != 1):
        new_k, new_v = new_k.contiguous(), new_v.contiguous()
    if keys.stride(3) != 1 or values.stride(3) != 1:
        raise ValueError("step_attention: expected keys and values whose channels are neighbours in memory")
    block_d = triton.next_power_of_2(dim)
    block_n, warps = tile(num_keys, block_d, q.element_size())
    with on_device(out):
        attention_kernel[(batch * heads,)](
            q, keys, values, out, new_k, new_v, table, positions, key_starts, key_lengths, softmax_scale,
            q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), keys.stride(2),
            values.stride(0), values.stride(1), values.stride(2),
            0 if new_k is None else new_k.stride(0), 0 if new_k is None else new_k.stride(1), heads, num_keys,
            BN=block_n, D=dim, BLOCK_D=block_d, RADIUS=0 if table is None else table.shape[1] // 2,
            ASM=q.is_cuda and not triton.knobs.runtime.interpret and torch.version.hip is None,
            PDL=dependent_launch(out.device), num_warps=warps, **follower_options(out.device),
        )  # fmt: skip
    return out
