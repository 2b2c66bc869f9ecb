"""Which block of which document each program of a packed batch works on."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fat5.ops.prepared_launch import ceil_divide, ceil_power_of_2, prepared


@triton.jit
def document_tiles_kernel(
    Offsets, Tiles, num_documents, num_tiles, BLOCK: tl.constexpr, DOCS: tl.constexpr, TILES: tl.constexpr
):
    """Fill a share of the map: entry t is (document, block in it), or (-1, first row) beyond the last document."""
    docs = tl.arange(0, DOCS)
    inside = docs < num_documents
    starts = tl.load(Offsets + docs, mask=inside, other=0).to(tl.int32)
    ends = tl.load(Offsets + docs + 1, mask=inside, other=0).to(tl.int32)
    blocks = (ends - starts + BLOCK - 1) // BLOCK
    upto = tl.cumsum(blocks, 0)
    total = tl.sum(blocks, 0)
    tiles = tl.program_id(0) * TILES + tl.arange(0, TILES)
    before = (upto[None, :] <= tiles[:, None]) & inside[None, :]  # [TILES, DOCS]
    document = tl.sum(before.to(tl.int32), 1)
    blocks_before = tl.sum(tl.where(before, blocks[None, :], 0), 1)
    unused = tiles >= total
    first_unused = tl.load(Offsets + num_documents).to(tl.int32) + (tiles - total) * BLOCK
    tl.store(Tiles + 2 * tiles, tl.where(unused, -1, document), mask=tiles < num_tiles)
    tl.store(Tiles + 2 * tiles + 1, tl.where(unused, first_unused, tiles - blocks_before), mask=tiles < num_tiles)


def document_tiles(cu_seqlens: Tensor, total: int, block: int) -> Tensor:
    """Return the map [tiles, 2] int32 for blocks of `block` rows, made on the device without looking at the offsets.

    There are always `total / block` tiles and one more a document, which is enough: rows that belong to no document get
    tiles too, so that the kernels can clear them.
    """
    documents = cu_seqlens.shape[0] - 1
    num_tiles = ceil_divide(total, block) + documents
    tiles = cu_seqlens.new_empty(num_tiles, 2, dtype=torch.int32)
    slots = max(16, ceil_power_of_2(documents))
    share = max(1, min(64, 16384 // slots))
    launch = prepared(
        document_tiles_kernel, (ceil_divide(num_tiles, share),), num_documents=documents, num_tiles=num_tiles,
        BLOCK=block, DOCS=slots, TILES=share,
    )  # fmt: skip
    launch(cu_seqlens, tiles)
    return tiles
