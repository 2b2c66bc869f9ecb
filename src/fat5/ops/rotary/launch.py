"""Launching the rotary kernel."""

from __future__ import annotations

import functools

from torch import Tensor

from fat5.ops.launching import launch, on_device
from fat5.ops.prepared_launch import LAUNCHES_KEPT, PreparedLaunch, ceil_divide, ceil_power_of_2
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
    out = q.new_empty(q.shape)
    key_out = None if k is None else k.new_empty(k.shape)
    if out.numel() == 0:
        return out, key_out
    q, k = _unit_stride(q), None if k is None else _unit_stride(k)
    tables = [x.contiguous() for x in (cos, sin, key_cos, key_sin)]
    key_strides = (0, 0, 0) if k is None else k.stride()[:3]
    turns = interleaved, inverse

    def run(tile: RotaryTile) -> None:
        _launch(tile, q.shape, q.stride()[:3], key_strides, *cos.shape[::2], *turns)(q, k, out, key_out, *tables)

    with on_device(q):
        block_d = ceil_power_of_2(q.shape[-1])
        size = (block_d, q.shape[-2], q.element_size(), interleaved, k is not None)
        launch("rotary", size, q.device, rotary_tile(block_d), rotary_candidates(block_d), run)
    return out, key_out


@functools.lru_cache(LAUNCHES_KEPT)
def _launch(
    tile: RotaryTile, shape: tuple[int, ...], strides: tuple[int, ...], key_strides: tuple[int, ...], tables: int,
    half: int, interleaved: bool, inverse: bool,
) -> PreparedLaunch:  # fmt: skip
    """Return the launch for queries of a shape and strides, keys of others, and contiguous tables [1 or B, L, half]."""
    batch, length, heads, width = shape
    tiles = ceil_divide(length * heads, tile.rows)
    rest = width - 2 * half
    names = ("q_batch", "q_token", "q_head", "k_batch", "k_token", "k_head")
    return PreparedLaunch(
        rotary_kernel, (batch * tiles,), **dict(zip(names, (*strides, *key_strides), strict=True)),
        cos_batch=0 if tables == 1 else length * half, cos_token=half, length=length, tiles_a_sequence=tiles,
        H=heads, D=width, HALF=half, BLOCK_HALF=ceil_power_of_2(half), BLOCK_REST=ceil_power_of_2(rest) if rest else 0,
        ROWS=tile.rows, INTERLEAVED=interleaved, INVERSE=inverse, **tile.options(),
    )  # fmt: skip


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
