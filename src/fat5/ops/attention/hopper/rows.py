"""What the backward does to rows before and after its main kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prepare_kernel(
    O,  # noqa: E741
    DO,
    LSE,
    PaddedLSE,
    Delta,
    Sums,
    Tiles,
    CuQ,
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
):
    """Write delta = rowsum(O * dO) and LSE for 64 rows of one head, padded with 0 and infinity; clear their sums of dQ.

    The padded arrays are [.., H, pitch], each sequence from a multiple of 64 on; Sums has D columns besides.
    """
    lanes = tl.arange(0, 64)
    dims = tl.arange(0, D)
    if VARLEN:
        head = tl.program_id(1)
        batch = 0
        seq = tl.load(Tiles + 2 * tl.program_id(0))
        if seq < 0:
            return
        first = tl.load(Tiles + 2 * tl.program_id(0) + 1) * 64
        begin = tl.load(CuQ + seq).to(tl.int64)
        queries = (tl.load(CuQ + seq + 1) - begin).to(tl.int32)
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
    tl.store(Delta + padded, tl.sum(o.to(tl.float32) * do.to(tl.float32), 1))
    lse = tl.load(LSE + tl.program_id(1).to(tl.int64) * M + row, mask=inside, other=float("inf"))
    tl.store(PaddedLSE + padded, lse)
    if CLEAR:
        tl.store(Sums + padded[:, None] * D + dims[None, :], tl.zeros([64, D], tl.float32))


@triton.jit
def finish_kernel(Sums, DQ, Tiles, CuQ, scale, H, M, pitch, D: tl.constexpr, VARLEN: tl.constexpr):
    """dQ = scale * Sums in the type of q, [B, M, H, D] or [total, H, D]; rows of no document become 0."""
    lanes = tl.arange(0, 64)
    dims = tl.arange(0, D)
    row = tl.program_id(0) * 64 + lanes.to(tl.int64)
    padded = tl.program_id(1).to(tl.int64) * pitch + tl.program_id(0) * 64 + lanes
    if VARLEN:
        head = tl.program_id(1)
        seq = tl.load(Tiles + 2 * tl.program_id(0))
        block = tl.load(Tiles + 2 * tl.program_id(0) + 1)
        if seq < 0:
            row = block + lanes.to(tl.int64)
            place = (row[:, None] * H + head) * D + dims[None, :]
            tl.store(DQ + place, tl.zeros([64, D], DQ.dtype.element_ty), mask=row[:, None] < M)
            return
        row = tl.load(CuQ + seq).to(tl.int64) + block * 64 + lanes
        end = tl.load(CuQ + seq + 1).to(tl.int64)
    else:
        head = tl.program_id(1) % H
        end = (tl.program_id(1) // H + 1).to(tl.int64) * M
        row += (tl.program_id(1) // H).to(tl.int64) * M
    values = tl.load(Sums + padded[:, None] * D + dims[None, :]) * scale
    place = (row[:, None] * H + head) * D + dims[None, :]
    tl.store(DQ + place, values.to(DQ.dtype.element_ty), mask=row[:, None] < end)
