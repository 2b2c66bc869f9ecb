"""What every attention kernel does to one tile of scores: find its sequence, add the bias, mask, drop."""

from __future__ import annotations

import triton
import triton.language as tl

NO_BIAS = tl.constexpr(0)
DISTANCE = tl.constexpr(1)
ALIBI = tl.constexpr(2)
ALIBI_SIGNED = tl.constexpr(3)
DENSE = tl.constexpr(4)

SHARED_OFFSET = tl.constexpr(0)  # one query offset for all sequences
OWN_OFFSET = tl.constexpr(1)  # an offset a sequence, in a tensor
END_OFFSET = tl.constexpr(2)  # keys minus queries of each document

AFTER = tl.constexpr(0)  # a dense bias is loaded and added after the product
BEFORE = tl.constexpr(1)  # loaded before the product and added after
START = tl.constexpr(2)  # the product starts from it
TURNED = tl.constexpr(3)  # loaded in the order of scores that are transposed, and added after the product

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def sequence_bounds(
    seq,
    CuQ,
    CuK,
    KeyStarts,
    KeyLengths,
    Offsets,
    offset,
    M,
    N,
    VARLEN: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):
    """Return a sequence's first query and key row in the input, its queries, its real keys [start, end) and offset."""
    if VARLEN:
        q_first = tl.load(CuQ + seq).to(tl.int64)
        k_first = tl.load(CuK + seq).to(tl.int64)
        num_queries = (tl.load(CuQ + seq + 1) - q_first).to(tl.int32)
        num_keys = (tl.load(CuK + seq + 1) - k_first).to(tl.int32)
    else:
        q_first = tl.zeros([], tl.int64)
        k_first = tl.zeros([], tl.int64)
        num_queries = M
        num_keys = N
    shift = offset
    if OFFSET == OWN_OFFSET:
        shift = tl.load(Offsets + seq).to(tl.int32)
    if OFFSET == END_OFFSET:
        shift = num_keys - num_queries
    start = 0
    end = num_keys
    if HAS_STARTS:
        start = tl.minimum(tl.maximum(tl.load(KeyStarts + seq).to(tl.int32), 0), num_keys)
    if HAS_LENGTHS:
        end = tl.minimum(start + tl.maximum(tl.load(KeyLengths + seq).to(tl.int32), 0), num_keys)
    return q_first, k_first, num_queries, start, end, shift


@triton.jit
def load_table(pointers, ASM: tl.constexpr):
    """Load table entries one by one.

    A plain load in a loop is pipelined through 4-byte asynchronous copies: 64 KB of shared memory a stage, and 2.5
    times the time. The compiler does not look into assembly.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0,[$1];", "=f,l", [pointers.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.load(pointers)


@triton.jit
def load_bias(pointers, inside, ASM: tl.constexpr, PAIRED: tl.constexpr):
    """Load a tile of a dense bias as float32, 0 where not `inside`.

    All are inside where it is None. By assembly only where the caller has measured a gain. PAIRED reads two neighbours
    of 16 bits at once; both must be inside or outside, and aligned.
    """
    if inside is None:
        return tl.load(pointers).to(tl.float32)
    elif not ASM:
        return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    elif pointers.dtype.element_ty.primitive_bitwidth == 32:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.b32 $0, [$1]; }",
            "=r,l,r",
            [pointers.to(tl.int64), inside.to(tl.int32)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    elif PAIRED:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.b32 $0, 0; @p ld.global.nc.b32 $0, [$1]; }",
            "=r,l,l,r,r",
            [pointers.to(tl.int64), inside.to(tl.int32)],
            dtype=pointers.dtype.element_ty,
            is_pure=True,
            pack=2,
        ).to(tl.float32)
    else:
        bits = tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b16 h; setp.ne.b32 p, $2, 0; mov.b16 h, 0; @p ld.global.nc.b16 h, [$1]; "
            "cvt.u32.u16 $0, h; }",
            "=r,l,r",
            [pointers.to(tl.int64), inside.to(tl.int32)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        return bits.to(tl.int16).to(pointers.dtype.element_ty, bitcast=True).to(tl.float32)


@triton.jit
def settled(x):
    """Return x, a product that is waited for here and not in the next turn of the loop.

    Where a matrix product is in flight, the assembler lets nothing else write what the next one adds to: it serialises
    them all. The compiler does not look into assembly, so it waits.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=1)


@triton.jit
def table_bias(distance, Center, RADIUS: tl.constexpr, ASM: tl.constexpr):
    """Return the bias by distance from a table [2R + 1] whose middle is `Center`."""
    return load_table(Center + tl.minimum(tl.maximum(distance, -RADIUS), RADIUS), ASM)


@triton.jit
def alibi_distance(distance, BIAS: tl.constexpr):
    """Return the factor of the slope at each distance."""
    d = distance.to(tl.float32)
    if BIAS == ALIBI:
        d = -tl.abs(d)
    return d


@triton.jit
def mask_scores(scores, distance, cols, key_start, key_end, CAUSAL: tl.constexpr, MASK_KEYS: tl.constexpr):
    """Hide later keys, and keys that are not real."""
    if CAUSAL:
        scores = tl.where(distance <= 0, scores, -float("inf"))
    if MASK_KEYS:
        scores = tl.where((cols >= key_start) & (cols < key_end), scores, -float("inf"))
    return scores


@triton.jit
def tile_is_special(
    m0,
    n0,
    key_start,
    key_end,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BIAS: tl.constexpr,
    RADIUS: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK_KEYS: tl.constexpr,
):
    """True if the tile's bias is not one constant, or it has hidden keys. `m0` is the position of the first query."""
    special = False
    if BIAS == DISTANCE:
        special = special | tile_is_near(m0, n0, BM, BN, RADIUS)
    if CAUSAL:
        special = special | (n0 + BN - 1 > m0)
    if MASK_KEYS:
        special = special | (n0 < key_start) | (n0 + BN > key_end)
    return special


@triton.jit
def tile_is_near(m0, n0, BM: tl.constexpr, BN: tl.constexpr, RADIUS: tl.constexpr):
    """True if some distance of the tile lies within the table's radius."""
    return (n0 + BN - 1 - m0 > -RADIUS) & (n0 - m0 - BM + 1 < RADIUS)


@triton.jit
def keep_weights(rows, cols, head, Seed, threshold):
    """True where dropout keeps a weight: a hash of (seed, query token, head, key token), as in the torch backend."""
    seed = tl.load(Seed).to(tl.uint32)
    x = rows.to(tl.uint32) * tl.cast(0x9E3779B1, tl.uint32) + seed
    x = x ^ ((head + 1).to(tl.uint32) * tl.cast(0xC2B2AE3D, tl.uint32))
    x = (x ^ (x >> 16)) * tl.cast(0x7FEB352D, tl.uint32)
    x = x + cols.to(tl.uint32) * tl.cast(0x85EBCA77, tl.uint32)
    x = (x ^ (x >> 16)) * tl.cast(0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.cast(0x846CA68B, tl.uint32)
    x = x ^ (x >> 16)
    return x >= threshold


@triton.jit
def load_rows(pointers, rows, row_start, row_end, dims, D: tl.constexpr, EVEN_ROWS: tl.constexpr, EVEN_D: tl.constexpr):
    """Load a tile of rows or, with both index vectors turned, of columns; what lies outside reads as 0."""
    if EVEN_ROWS and EVEN_D:
        return tl.load(pointers)
    elif EVEN_ROWS:
        return tl.load(pointers, mask=dims < D, other=0.0)
    elif EVEN_D:
        return tl.load(pointers, mask=(rows >= row_start) & (rows < row_end), other=0.0)
    else:
        return tl.load(pointers, mask=(rows >= row_start) & (rows < row_end) & (dims < D), other=0.0)


@triton.jit
def load_stats(Stats, rows, num_queries, EVEN_ROWS: tl.constexpr, PAIRED: tl.constexpr):
    """Return LSE and delta of rows, inf and 0 where there is no row.

    PAIRED reads both at once. In a loop whose pipeline copies them, a tensor of fewer elements than the program has
    threads is copied element by element in the layout of the scores, 32 copies a thread; a larger one in one piece.
    """
    if PAIRED:
        pairs = Stats + 2 * rows[:, None] + tl.arange(0, 2)[None, :]
        if EVEN_ROWS:
            lse, delta = tl.split(tl.load(pairs))
        else:
            lse, delta = tl.split(tl.load(pairs, mask=rows[:, None] < num_queries, other=0.0))
            lse = tl.where(rows < num_queries, lse, float("inf"))
    elif EVEN_ROWS:
        lse = tl.load(Stats + 2 * rows)
        delta = tl.load(Stats + 2 * rows + 1)
    else:
        lse = tl.load(Stats + 2 * rows, mask=rows < num_queries, other=float("inf"))
        delta = tl.load(Stats + 2 * rows + 1, mask=rows < num_queries, other=0.0)
    return lse, delta


@triton.jit
def first_aligned(start, offset, BN: tl.constexpr):
    """Return the last key tile boundary at or before `start`, where boundaries are `offset` plus multiples of BN."""
    phase = ((offset % BN) + BN) % BN
    distance = start - phase
    return phase + ((distance + BN * 65536) // BN - 65536) * BN
