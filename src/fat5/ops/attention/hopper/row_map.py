"""Rows of a ragged batch beside its tiles of work: where the padded ones lie in a packed batch, and those of no
sequence.

Programs of the record kernel write both: it runs anyway, and leaves most of the card to them.
"""

from __future__ import annotations

import dataclasses

import triton
import triton.language as tl
from torch import Tensor

from fat5.ops.attention.tile_scores import sequence_bounds


@dataclasses.dataclass(frozen=True)
class Beside:
    """What a launch of the record kernel writes beside the records.

    Attributes:
        tiles: Map of padded to packed queries [blocks, 2] int32, see `map_rows`.
        unused: At most two results [.., L, H, D] of whose rows no tile writes those of no sequence: they become 0.
        lse: The forward's [H, L]: infinity there.
    """

    tiles: Tensor | None = None
    unused: tuple[Tensor, ...] = ()
    lse: Tensor | None = None


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
def clear_rows(
    First, Second, LSE, first_row, first_head, second_row, second_head, part, parts, head, Cu, KeyStarts, KeyLengths,
    length, sequences, D: tl.constexpr, VARLEN: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """Write 0 to a part of the rows of no sequence in one head of First and Second, and infinity to its LSE.

    A packed batch has them behind the last offset, a row of a padded one (`parts` parts each) around its real keys.
    """
    row = 0
    start = 0
    if VARLEN:
        end = tl.load(Cu + sequences).to(tl.int32)
    else:
        row = part // parts
        _, _, _, start, end, _ = sequence_bounds(
            row, None, None, KeyStarts, KeyLengths, None, 0, 0, length, False, 0, HAS_STARTS, HAS_LENGTHS
        )
    lanes = tl.arange(0, 64)
    dims = tl.arange(0, D)
    for block in range(part % parts, tl.cdiv(length, 64), parts):
        if (block * 64 < start) | (block * 64 + 64 > end):
            place = block * 64 + lanes
            outside = ((place < start) | (place >= end)) & (place < length)
            place = tl.cast(row, tl.int64) * length + place
            mask = outside[:, None] & (dims[None, :] < D)
            zeros = tl.zeros([64, D], tl.float32)
            if First is not None:
                out = First + place[:, None] * first_row + head * first_head + dims[None, :]
                tl.store(out, zeros.to(First.dtype.element_ty), mask=mask)
            if Second is not None:
                out = Second + place[:, None] * second_row + head * second_head + dims[None, :]
                tl.store(out, zeros.to(Second.dtype.element_ty), mask=mask)
            if LSE is not None:
                tl.store(LSE + tl.cast(head, tl.int64) * length + place, float("inf"), mask=outside)
