"""The rotary kernel: queries and keys in one launch, forward and backward."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rotate(
    X, Out, Cos, Sin, place, out_place, table_place, inside,
    D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Rotate rows of one head and one token each: `place` [ROWS, 1] is where they start."""
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    both = inside & (pair < HALF) if HALF != BLOCK_HALF else inside
    cos = tl.load(Cos + table_place + pair, mask=both, other=0.0)
    sin = tl.load(Sin + table_place + pair, mask=both, other=0.0)
    if INVERSE:
        sin = -sin
    if INTERLEAVED:
        # Neighbours come in one load of both, so that it is as wide as a load can be.
        channel = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        there = inside & (channel < 2 * HALF) if HALF != BLOCK_HALF else inside
        x = tl.load(X + place + channel, mask=there, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, [x.shape[0], BLOCK_HALF, 2]))
        turned = tl.join(first * cos - second * sin, second * cos + first * sin)
        y = tl.reshape(turned, [x.shape[0], 2 * BLOCK_HALF])
        tl.store(Out + out_place + channel, y.to(Out.dtype.element_ty), mask=there)
    else:
        first = tl.load(X + place + pair, mask=both, other=0.0).to(tl.float32)
        second = tl.load(X + place + HALF + pair, mask=both, other=0.0).to(tl.float32)
        y = first * cos - second * sin
        tl.store(Out + out_place + pair, y.to(Out.dtype.element_ty), mask=both)
        y = second * cos + first * sin
        tl.store(Out + out_place + HALF + pair, y.to(Out.dtype.element_ty), mask=both)
    if BLOCK_REST > 0:
        channel = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        there = inside & (channel < D)
        tl.store(Out + out_place + channel, tl.load(X + place + channel, mask=there, other=0.0), mask=there)


@triton.jit
def rotary_kernel(
    Q, K, QOut, KOut, QCos, QSin, KCos, KSin,
    q_batch, q_token, q_head, k_batch, k_token, k_head, cos_batch, cos_token, length, tiles_a_sequence,
    H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    ROWS: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Rotate ROWS heads, token after token, of one sequence; `K` may be None."""
    batch = (tl.program_id(0) // tiles_a_sequence).to(tl.int64)
    row = (tl.program_id(0) % tiles_a_sequence) * ROWS + tl.arange(0, ROWS)[:, None]
    token, head = (row // H).to(tl.int64), (row % H).to(tl.int64)
    inside = token < length
    out = batch * length * (H * D) + row.to(tl.int64) * D
    table = batch * cos_batch + token * cos_token
    _rotate(
        Q, QOut, QCos, QSin, batch * q_batch + token * q_token + head * q_head, out, table, inside,
        D, HALF, BLOCK_HALF, BLOCK_REST, INTERLEAVED, INVERSE,
    )  # fmt: skip
    if K is not None:
        _rotate(
            K, KOut, KCos, KSin, batch * k_batch + token * k_token + head * k_head, out, table, inside,
            D, HALF, BLOCK_HALF, BLOCK_REST, INTERLEAVED, INVERSE,
        )  # fmt: skip
