"""The kernel of the choice of the next token."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def choice_kernel(
    Logits, Tokens, Sequences, Places, Lengths, Ended, Eos, logits_row, sequence_row, vocab_size, room, pad_token_id,
    num_eos, BLOCK: tl.constexpr, BLOCK_EOS: tl.constexpr,
):  # fmt: skip
    """One program: one row. The lowest of the tokens that are equally likely; NaN counts as the greatest."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    found = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab_size, BLOCK):
        columns = first + lanes
        x = tl.load(Logits + row * logits_row + columns, mask=columns < vocab_size, other=-float("inf")).to(tl.float32)
        x = tl.where(x != x, float("inf"), x)
        better = x > best
        best, found = tl.where(better, x, best), tl.where(better, columns, found)
    top = tl.max(best, 0)
    chosen = tl.min(tl.where(best == top, found, vocab_size), 0).to(tl.int64)
    place = tl.load(Places + row)
    if Eos is not None:
        ended = tl.load(Ended + row) != 0
        chosen = tl.where(ended, pad_token_id, chosen)
        eos = tl.arange(0, BLOCK_EOS)
        ends = tl.load(Eos + eos, mask=eos < num_eos, other=-1) == chosen
        tl.store(Lengths + row, tl.load(Lengths + row) + tl.where(ended, 0, 1))
        tl.store(Ended + row, (ended | (tl.max(ends.to(tl.int32), 0) > 0)).to(Ended.dtype.element_ty))
    else:
        tl.store(Lengths + row, tl.load(Lengths + row) + 1)
    tl.store(Sequences + row * sequence_row + place, chosen, mask=place < room)
    tl.store(Places + row, place + 1)
    tl.store(Tokens + row, chosen)
