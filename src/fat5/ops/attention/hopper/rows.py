"""What the backward does to rows before and after its main kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from fat5.ops.dependent_launch import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["near_size", "near_rounds"])
def prepare_kernel(
    O,  # noqa: E741
    DO,
    LSE,
    PaddedLSE,
    Delta,
    Sums,
    Near,
    Tiles,
    CuQ,
    near_size,
    near_rounds,
    o_batch,
    o_row,
    o_head,
    do_batch,
    do_row,
    do_head,
    H,
    M,
    pitch,
    D: tl.constexpr,
    VARLEN: tl.constexpr,
    CLEAR: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """Write delta = rowsum(O * dO) and LSE for 64 rows of one head, padded with 0 and infinity; clear what is added to.

    The padded arrays are [.., H, pitch], each sequence from a multiple of 64 on; Sums, of dQ, has D columns besides.
    Near has `near_size` entries, of which each program clears `near_rounds` pieces.
    """
    if CHAIN:
        gdc_launch_dependents()
    lanes = tl.arange(0, 64)
    dims = tl.arange(0, D)
    if VARLEN:
        head = tl.program_id(1)
        batch = 0
        seq = tl.load(Tiles + 2 * tl.program_id(0))
        first = tl.load(Tiles + 2 * tl.program_id(0) + 1) * 64
        begin = tl.load(CuQ + tl.maximum(seq, 0)).to(tl.int64)
        queries = (tl.load(CuQ + tl.maximum(seq, 0) + 1) - begin).to(tl.int32)
        queries = tl.where(seq < 0, 0, queries)  # a tile of no document
    else:
        head = tl.program_id(1) % H
        batch = tl.program_id(1) // H
        first = tl.program_id(0) * 64
        begin = tl.zeros([], tl.int64)
        queries = M
    padded = tl.program_id(1).to(tl.int64) * pitch + tl.program_id(0) * 64 + lanes
    inside = first + lanes < queries
    row = begin + first + lanes
    base = row[:, None] * o_row + tl.cast(batch, tl.int64) * o_batch + tl.cast(head, tl.int64) * o_head + dims[None, :]
    o = tl.load(O + base, mask=inside[:, None], other=0.0)
    base = (
        row[:, None] * do_row + tl.cast(batch, tl.int64) * do_batch + tl.cast(head, tl.int64) * do_head + dims[None, :]
    )
    do = tl.load(DO + base, mask=inside[:, None], other=0.0)
    lse = tl.load(LSE + tl.program_id(1).to(tl.int64) * M + row, mask=inside, other=float("inf"))
    if CHAIN:
        gdc_wait()
    tl.store(Delta + padded, tl.sum(o.to(tl.float32) * do.to(tl.float32), 1))
    tl.store(PaddedLSE + padded, lse)
    if CLEAR:
        tl.store(Sums + padded[:, None] * D + dims[None, :], tl.zeros([64, D], tl.float32))
    piece = tl.arange(0, 1024)
    for i in range(near_rounds):
        turn = (i * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        entry = turn * 1024 + piece
        tl.store(Near + entry, tl.zeros([1024], Near.dtype.element_ty), mask=entry < near_size)


@triton.jit
def finish_rows(
    Sums, DQ, dq_batch, dq_row, dq_head, Tiles, CuQ, scale, block, head_row, H, M, pitch,
    D: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """dQ = scale * Sums for 64 rows in the type of q, [B, M, H, D] or [total, H, D]; rows of no document become 0.

    `head_row` is batch * H + head.
    """
    lanes = tl.arange(0, 64)
    dims = tl.arange(0, D)
    row = block * 64 + lanes.to(tl.int64)
    padded = tl.cast(head_row, tl.int64) * pitch + block * 64 + lanes
    if VARLEN:
        head = head_row
        batch = 0
        seq = tl.load(Tiles + 2 * block)
        tile = tl.load(Tiles + 2 * block + 1)
        real = seq >= 0  # else `tile` is the first of 64 rows beyond all documents
        begin = tl.load(CuQ + tl.maximum(seq, 0)).to(tl.int64)
        row = tl.where(real, begin + tile * 64, tile) + lanes
        end = tl.where(real, tl.load(CuQ + tl.maximum(seq, 0) + 1), M).to(tl.int64)
    else:
        real = True
        head = head_row % H
        batch = head_row // H
        end = M
    values = tl.load(Sums + padded[:, None] * D + dims[None, :], mask=real & (dims[None, :] < D), other=0.0) * scale
    place = (
        row[:, None] * dq_row + tl.cast(batch, tl.int64) * dq_batch + tl.cast(head, tl.int64) * dq_head + dims[None, :]
    )
    tl.store(DQ + place, values.to(DQ.dtype.element_ty), mask=row[:, None] < end)
