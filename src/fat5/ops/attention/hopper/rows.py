"""What the backward does to rows before and after its main kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from fat5.ops.attention.hopper.row_map import clear_keys
from fat5.ops.dependent_launch import gdc_launch_dependents, gdc_wait


@triton.jit
def _place(piece, row_blocks, H, VARLEN: tl.constexpr, REVERSED: tl.constexpr):
    """Return batch, head, and block of 64 rows of a piece.

    Heads of the same rows are neighbours, in memory too. REVERSED, the last rows come first.
    """
    head = piece % H
    block = piece // H
    batch = 0
    if not VARLEN:
        batch = block // row_blocks
        block = block % row_blocks
    if REVERSED:
        block = row_blocks - 1 - block
    return batch, head, block


@triton.jit
def _clear(X, size, rounds, program, programs):
    """Write 0 to this program's `rounds` pieces of `size` elements."""
    piece = tl.arange(0, 1024)
    for i in range(rounds):
        entry = (tl.cast(i, tl.int64) * programs + program) * 1024 + piece
        tl.store(X + entry, tl.zeros([1024], X.dtype.element_ty), mask=entry < size)


@triton.jit(do_not_specialize=["near_rounds", "far_size", "far_rounds"])
def prepare_kernel(
    O,  # noqa: E741
    DO,
    LSE,
    PaddedLSE,
    Delta,
    Sums,
    Near,
    Far,
    Map,
    near_size,
    near_rounds,
    far_size,
    far_rounds,
    o_batch,
    o_row,
    o_head,
    do_batch,
    do_row,
    do_head,
    H,
    M,
    row_blocks,
    DK,
    DV,
    dk_batch,
    dk_row,
    dk_head,
    KeyStarts,
    KeyLengths,
    N,
    D: tl.constexpr,
    VARLEN: tl.constexpr,
    CLEAR: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    REVERSED: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """Write delta = rowsum(O * dO) and LSE for 64 rows of one head, padded with 0 and infinity; clear what is added to.

    The padded arrays are [.., H, 64 * row_blocks], each sequence from a multiple of 64 on, by the map of packed rows
    (`row_map.py`); Sums, of dQ, has D columns besides. Each program clears so many pieces of Near and of Far, and with
    KeyStarts or KeyLengths its part of the keys in DK and DV that are not real.
    """
    if CHAIN:
        gdc_launch_dependents()
    lanes = tl.arange(0, 64)
    dims = tl.arange(0, D)
    program = tl.program_id(0)
    batch, head, block = _place(program, row_blocks, H, VARLEN, REVERSED)
    lse_row = tl.cast(batch, tl.int64) * H + head
    padded = (lse_row * row_blocks + block) * 64 + lanes
    sums = Sums + padded[:, None] * D + dims[None, :]
    first = block * 64
    rows = M - first
    if VARLEN:
        if CHAIN:
            gdc_wait()
        first = tl.load(Map + 2 * block)
        rows = tl.load(Map + 2 * block + 1)
        if CLEAR:  # while those two are under way
            tl.store(sums, tl.zeros([64, D], tl.float32))
    inside = lanes < rows
    row = tl.cast(first, tl.int64) + lanes
    base = row[:, None] * o_row + tl.cast(batch, tl.int64) * o_batch + tl.cast(head, tl.int64) * o_head + dims[None, :]
    # Nobody reads the output after this; the backward kernel reads its gradient again.
    o = tl.load(O + base, mask=inside[:, None], other=0.0, eviction_policy="evict_first")
    base = (
        row[:, None] * do_row + tl.cast(batch, tl.int64) * do_batch + tl.cast(head, tl.int64) * do_head + dims[None, :]
    )
    do = tl.load(DO + base, mask=inside[:, None], other=0.0)
    lse = tl.load(LSE + lse_row * M + row, mask=inside, other=float("inf"))
    if not VARLEN:
        if CHAIN:
            gdc_wait()
        if CLEAR:  # while the loads above are under way
            tl.store(sums, tl.zeros([64, D], tl.float32))
    _clear(Near, near_size, near_rounds, program, tl.num_programs(0))
    _clear(Far, far_size, far_rounds, program, tl.num_programs(0))
    tl.store(Delta + padded, tl.sum(o.to(tl.float32) * do.to(tl.float32), 1))
    tl.store(PaddedLSE + padded, lse)
    if HAS_STARTS | HAS_LENGTHS:
        clear_keys(
            DK, DV, dk_batch, dk_row, dk_head, KeyStarts, KeyLengths, N, batch, head, block, row_blocks, D, HAS_STARTS,
            HAS_LENGTHS,
        )  # fmt: skip


@triton.jit
def finish_rows(
    Sums, DQ, dq_batch, dq_row, dq_head, Map, scale, piece, H, M, row_blocks,
    D: tl.constexpr, VARLEN: tl.constexpr, REVERSED: tl.constexpr,
):  # fmt: skip
    """dQ = scale * Sums for 64 rows in the type of q, [B, M, H, D] or [total, H, D]; rows of no document become 0."""
    batch, head, block = _place(piece, row_blocks, H, VARLEN, REVERSED)
    lanes = tl.arange(0, 64)
    dims = tl.arange(0, D)
    padded = ((tl.cast(batch, tl.int64) * H + head) * row_blocks + block) * 64 + lanes
    # Read once, and 0 in padding: no mask, so that the load waits for nothing.
    values = tl.load(Sums + padded[:, None] * D + dims[None, :], eviction_policy="evict_first")
    if VARLEN:
        first = tl.load(Map + 2 * block)
        rows = tl.load(Map + 2 * block + 1)
        rows = tl.where(rows > 0, rows, M - first)  # of no document
    else:
        first = block * 64
        rows = M - first
    row = tl.cast(first, tl.int64) + lanes
    place = (
        row[:, None] * dq_row + tl.cast(batch, tl.int64) * dq_batch + tl.cast(head, tl.int64) * dq_head + dims[None, :]
    )
    tl.store(DQ + place, (values * scale).to(DQ.dtype.element_ty), mask=(lanes < rows)[:, None])
