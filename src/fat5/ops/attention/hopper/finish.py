"""The kernel behind the backward's products: dQ in the type of q, and the near tiles of dS along their diagonals."""

from __future__ import annotations

import triton
import triton.language as tl

from fat5.ops.attention.hopper.rows import finish_rows
from fat5.ops.attention.hopper.table_gradient import sum_diagonals
from fat5.ops.dependent_launch import gdc_launch_dependents, gdc_wait


@triton.jit
def finish_kernel(
    Sums,
    DQ,
    dq_batch,
    dq_row,
    dq_head,
    Map,
    scale,
    row_blocks,
    H,
    M,
    Near,
    Parts,
    diagonals,
    shares,
    sets,
    offsets,
    first_offset,
    blocks,
    query_blocks,
    shift_blocks,
    row_sets,
    D: tl.constexpr,
    VARLEN: tl.constexpr,
    WRITTEN: tl.constexpr,
    BY_ROW: tl.constexpr,
    REVERSED: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """The first `diagonals` programs take near tiles, an offset, share and head each; the others 64 rows of dQ each.

    Two jobs in one launch, as neither fills the card to its end.
    """
    if CHAIN:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program < diagonals:
        place = program % offsets
        share = program // offsets % shares
        head = program // offsets // shares
        sum_diagonals(
            Near, Parts, place, share, head, shares, sets, H, offsets, first_offset, blocks, query_blocks,
            shift_blocks, row_sets, WRITTEN, BY_ROW,
        )  # fmt: skip
    else:
        finish_rows(
            Sums, DQ, dq_batch, dq_row, dq_head, Map, scale, program - diagonals, H, M, row_blocks, D, VARLEN, REVERSED
        )
