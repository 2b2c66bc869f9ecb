"""Launching the rotary kernel."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fat5.ops.launching import launch, on_device
from fat5.ops.rotary.kernels import rotary_kernel
from fat5.ops.rotary.tiles import RotaryTile, rotary_candidates, rotary_tile


def run_rotary(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    key_cos: Tensor,
    key_sin: Tensor,
    interleaved: bool,
    inverse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Rotate queries and keys into new tensors.

    Args:
        q: [B, L, H, D].
        k: Shaped as q, or None.
        cos: [1 or B, L, R / 2], float32.
        sin: Shaped as cos.
        key_cos: The keys', shaped as cos.
        key_sin: Likewise.
        interleaved: Pairs are neighbours.
        inverse: Rotate by the negative angle: the gradient of the rotation.
    """
    batch, length, heads, width = q.shape
    half = cos.shape[-1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    key_out = None if k is None else torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if out.numel() == 0:
        return out, key_out
    q, k = _unit_stride(q), None if k is None else _unit_stride(k)
    tables = [x.contiguous() for x in (cos, sin, key_cos, key_sin)]
    strides = (*q.stride()[:3], *((0, 0, 0) if k is None else k.stride()[:3]))
    rest = width - 2 * half
    block_half = triton.next_power_of_2(half)

    def run(tile: RotaryTile) -> None:
        tiles = triton.cdiv(length * heads, tile.rows)
        rotary_kernel[(batch * tiles,)](
            q, k, out, key_out, *tables, *strides, 0 if len(cos) == 1 else tables[0].stride(0), half, length, tiles,
            H=heads, D=width, HALF=half, BLOCK_HALF=block_half, BLOCK_REST=triton.next_power_of_2(rest) if rest else 0,
            ROWS=tile.rows, INTERLEAVED=interleaved, INVERSE=inverse, **tile.options(),
        )  # fmt: skip

    with on_device(q):
        block_d = triton.next_power_of_2(width)
        size = (block_d, heads, q.element_size(), interleaved, k is not None)
        launch("rotary", size, q.device, rotary_tile(block_d), rotary_candidates(block_d), run)
    return out, key_out


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
