"""Rows of a ragged batch beside its tiles of work: where the padded ones lie in a packed batch, and those of no
sequence in a padded one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fat5.ops.attention.tile_scores import sequence_bounds


@triton.jit
def map_rows(Map, blocks, CuQ, M, sequences, SHARE: tl.constexpr, SLOTS: tl.constexpr, share):
    """Write a share of the map: of 64 padded rows, the first packed one and how many are a document's.

    Documents start at multiples of 64 padded rows. Blocks beyond them have no row, and stand for those from the last
    document's end on.
    """
    lanes = tl.arange(0, SLOTS)
    real = lanes < sequences
    first = tl.load(CuQ + lanes, mask=real, other=0).to(tl.int32)
    rows = tl.load(CuQ + lanes + 1, mask=real, other=0).to(tl.int32) - first
    end = tl.load(CuQ + sequences).to(tl.int32)
    counts = (rows + 63) // 64
    upto = tl.cumsum(counts, 0)
    block = share * SHARE + tl.arange(0, SHARE)
    before = (upto[None, :] <= block[:, None]) & real[None, :]  # [SHARE, SLOTS]
    own = tl.sum(before.to(tl.int32), 1)[:, None] == lanes[None, :]
    row = (block - tl.sum(tl.where(before, counts[None, :], 0), 1)) * 64
    left = tl.sum(tl.where(own, rows[None, :], 0), 1) - row
    used = block < tl.sum(counts, 0)
    row += tl.where(used, tl.sum(tl.where(own, first[None, :], 0), 1), end)
    inside = block < blocks
    tl.store(Map + 2 * block, tl.where(used, row, tl.minimum(row, M)), mask=inside)
    tl.store(Map + 2 * block + 1, tl.where(used, tl.minimum(left, 64), 0), mask=inside)


@triton.jit
def clear_keys(
    DK, DV, dk_batch, dk_row, dk_head, KeyStarts, KeyLengths, N, batch, head, part, parts, D: tl.constexpr,
    HAS_STARTS: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """Write 0 to a part of the keys around the real ones in one head of a row of DK and DV, which have equal strides.

    No tile of work does; a block of 64 keys that are all real costs nothing.
    """
    _, _, _, start, end, _ = sequence_bounds(
        batch, None, None, KeyStarts, KeyLengths, None, 0, 0, N, False, 0, HAS_STARTS, HAS_LENGTHS
    )
    dims = tl.arange(0, D)
    zeros = tl.zeros([64, D], DK.dtype.element_ty)
    for block in range(part, tl.cdiv(N, 64), parts):
        if (block * 64 < start) | (block * 64 + 64 > end):
            place = block * 64 + tl.arange(0, 64)
            outside = ((place < start) | (place >= end)) & (place < N)
            row = tl.cast(batch, tl.int64) * dk_batch + head * dk_head
            offsets = row + tl.cast(place, tl.int64)[:, None] * dk_row + dims[None, :]
            tl.store(DK + offsets, zeros, mask=outside[:, None])
            tl.store(DV + offsets, zeros, mask=outside[:, None])
