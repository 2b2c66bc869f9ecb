"""The gradient of a table by distance from what the backward kernel left: near tiles of dS and sums of far ones.

No atomics: both kernels add in float32 and in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fat5.ops.dependent_launch import gdc_wait


@triton.jit
def sum_diagonals(
    Near,
    Parts,
    place,
    share,
    head,
    shares,
    sets,
    heads,
    offsets,
    first_offset,
    blocks,
    query_blocks,
    shift_blocks,
    row_sets,
    WRITTEN: tl.constexpr,
    BY_ROW: tl.constexpr,
):
    """Add the dS^T tiles of a tile offset, a share of the sets and a head, then along their diagonals.

    Near is [sets, heads, offsets, 64, 64]. A set is a block of 64 keys, or a group of them; `offset` is the distance
    between key block and query block in blocks. Where not all are WRITTEN, sets are key blocks, `blocks` a row, and a
    tile exists where its query block does. BY_ROW a share is a row's `row_sets` sets. Parts is [shares, heads,
    offsets, 128]: distances 64 * offset - 64 and on, and the row's phase more.
    """
    lanes = tl.arange(0, 64)
    acc = tl.zeros([64, 64], tl.float32)
    first = share
    end = sets
    step = shares
    if BY_ROW:
        first = share * row_sets
        end = first + row_sets
        step = 1
    for item in tl.range(first, end, step, loop_unroll_factor=2):  # so that two tiles are under way together
        query_block = item % blocks - (place + first_offset) - shift_blocks
        there = ((query_block >= 0) & (query_block < query_blocks)) | WRITTEN
        tile = ((tl.cast(item, tl.int64) * heads + head) * offsets + place) * 4096
        values = tl.load(
            Near + tile + lanes[:, None] * 64 + lanes[None, :], mask=(lanes[:, None] < 64) & there, other=0.0
        )
        acc += values.to(tl.float32)
    index = lanes[:, None] - lanes[None, :]  # turns row i right by i: column c then holds distance c, or c - 64
    wrapped = index < 0
    skewed = tl.gather(acc, index & 63, 1)
    out = Parts + ((share * heads + head) * offsets + place) * 128
    tl.store(out + lanes, tl.sum(tl.where(wrapped, skewed, 0.0), 0))
    tl.store(out + 64 + lanes, tl.sum(tl.where(wrapped, 0.0, skewed), 0))


@triton.jit
def table_kernel(
    Parts,
    Far,
    Phases,
    DTable,
    shares,
    heads,
    far_blocks,
    first_offset,
    SHARES: tl.constexpr,
    RADIUS: tl.constexpr,
    OFFSETS: tl.constexpr,
    WIDTH: tl.constexpr,
    PHASED: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """Write WIDTH entries of the gradient [H, 2R + 1]. Far is [2, far_blocks, heads]: sums left and right of it."""
    if CHAIN:
        gdc_wait()
    head = tl.program_id(1)
    entry = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    leftmost = tl.program_id(0) == 0
    rightmost = tl.program_id(0) == tl.num_programs(0) - 1
    distance = entry - RADIUS
    column = tl.arange(0, 128)[None, :]
    acc = tl.zeros([WIDTH], tl.float32)
    left = tl.zeros([], tl.float32)
    right = tl.zeros([], tl.float32)
    for begin in range(0, shares, SHARES):
        share = begin + tl.arange(0, SHARES)
        some = share < shares
        phase = tl.zeros([SHARES], tl.int32)
        if PHASED:
            phase = tl.load(Phases + share, mask=some, other=0)
        for place in tl.range(0, OFFSETS, loop_unroll_factor=8):  # so that the loads are under way together
            part = Parts + ((share[:, None] * heads + head) * OFFSETS + place) * 128
            first = (first_offset + place) * 64 - 64 + phase[:, None]
            c = distance[None, :] - first
            acc += tl.sum(tl.load(part + c, mask=(c >= 0) & (c < 128) & some[:, None], other=0.0), 0)
            beyond = (leftmost & (first + column < -RADIUS)) | (rightmost & (first + column > RADIUS))
            values = tl.load(part + column, mask=beyond & some[:, None], other=0.0)
            left += tl.sum(tl.where(first + column < -RADIUS, values, 0.0))
            right += tl.sum(tl.where(first + column > RADIUS, values, 0.0))
    entries = tl.arange(0, 1024)
    for start in range(0, far_blocks, 1024):
        inside = start + entries < far_blocks
        far = Far + tl.cast(start + entries, tl.int64) * heads + head
        left += tl.sum(tl.load(far, mask=inside & leftmost, other=0.0))
        right += tl.sum(tl.load(far + tl.cast(far_blocks, tl.int64) * heads, mask=inside & rightmost, other=0.0))
    acc += tl.where(distance == -RADIUS, left, 0.0) + tl.where(distance == RADIUS, right, 0.0)
    tl.store(DTable + head * (2 * RADIUS + 1) + entry, acc, mask=entry < 2 * RADIUS + 1)
