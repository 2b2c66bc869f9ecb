"""What the Hopper kernels share: layouts, barriers, the next tile of work, its place in memory, and its bias."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fat5.ops.attention.hopper.interface import tma_load, tma_store

FIELDS = gl.constexpr(16)
"""Integers of a record, one tile of work: see `records.py`, which writes them."""

BEYOND = gl.constexpr(2**30)
"""Rows of a sequence end at this index in a descriptor of sequences: see `descriptors.py`."""


@gluon.constexpr_function
def accumulator(columns):
    """Layout of a [64, columns] accumulator of one warpgroup."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def shared_layout(rows, columns, dtype):
    """Layout in shared memory that both TMA and wgmma read."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)


@gluon.jit
def barriers(n: gl.constexpr, count: gl.constexpr):
    """Make n barriers that open after `count` arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(made.index(i), count=count)
    return made


@gluon.jit
def dealt_tile(turn, program, programs, tiles, blocks, chunk, FALLING: gl.constexpr):
    """Return the causal tile `head * blocks + block` that a program takes in a turn; `tiles` or more is none.

    A tile is worth `block` (FALLING: `blocks - block`) units of work, up to a constant. Each `chunk` of tiles, those of
    some turns, is the next ones in order, sorted by falling work, and dealt forth and back. In closed form: tiles of
    equal work are one a head; the chunk's first head lacks those below `begin % blocks`, its last those from
    `end % blocks` on, so that their number is constant on three stretches.
    """
    place = turn * programs + program
    if turn % 2 == 1:
        place = turn * programs + programs - 1 - program
    begin = place // chunk * chunk
    end = gl.minimum(begin + chunk, tiles)
    first_head = begin // blocks
    between = end // blocks - first_head - 1  # heads that are there as a whole; -1: the chunk lies in one head
    first_rank = begin % blocks
    end_rank = end % blocks
    high = gl.maximum(first_rank, end_rank)
    low = gl.minimum(first_rank, end_rank)
    outer = gl.maximum(between + 1, 1)
    inner = gl.maximum(gl.where(first_rank <= end_rank, between + 2, between), 1)
    left = place - begin
    above = (blocks - high) * (between + 1)
    middle = (high - low) * gl.where(first_rank <= end_rank, between + 2, between)
    in_above = left < above
    in_middle = left < above + middle
    left = gl.where(in_above, left, gl.where(in_middle, left - above, left - above - middle))
    top = gl.where(in_above, blocks, gl.where(in_middle, high, low))
    each = gl.where(in_above, outer, gl.where(in_middle, inner, outer))
    without_first = gl.where(in_above | (in_middle & (first_rank <= end_rank)), 0, 1)
    rank = top - 1 - left // each
    head = first_head + left % each + without_first
    if FALLING:
        rank = blocks - 1 - rank
    return gl.where(place < tiles, head * blocks + rank, tiles)


@gluon.jit
def next_tile(turn, work, ROWS: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr, FALLING: gl.constexpr):
    """Return this program's tile of a turn: (there is one, head, first row, q y, q x, k y, k x, queries, keys, shift,
    rows, slot).

    `work` is (Records, tiles, blocks, H, queries, keys, shift, pitch, turns, chunk). Tiles of equal work are dealt in
    order; causal ones by `dealt_tile`; where sequences differ, RAGGED, each has a record. There is no tile from `turns`
    on.
    (y, x) is the place of a sequence's first row in a descriptor, `rows` that of its first query in the arrays
    [.., H, pitch], `slot` the running number of a block of keys.
    """
    records, tiles, blocks, heads, queries, keys, shift, pitch, turns, chunk = work
    place = turn * gl.num_programs(0) + gl.program_id(0)
    if RAGGED:
        record = records + (gl.minimum(turn, turns - 1) * gl.num_programs(0) + gl.program_id(0)) * FIELDS
        head = gl.load(record)
        return (
            (head >= 0) & (turn < turns),
            gl.maximum(head, 0),
            gl.load(record + 1),
            gl.load(record + 2),
            gl.load(record + 3),
            gl.load(record + 4),
            gl.load(record + 5),
            gl.load(record + 6),
            gl.load(record + 7),
            gl.load(record + 8),
            gl.load(record + 9),
            gl.load(record + 10),
        )
    else:
        tile = place
        if CAUSAL:
            tile = dealt_tile(turn, gl.program_id(0), gl.num_programs(0), tiles, blocks, chunk, FALLING)
        there = tile < tiles
        batch = tile // blocks // heads
        head = tile // blocks % heads
        block = tile % blocks
        return (
            there,
            head,
            block * ROWS,
            batch,
            0,
            batch,
            0,
            queries,
            keys,
            shift,
            batch * heads * pitch,
            batch * blocks + block,
        )


@gluon.jit
def key_tiles(first, keys, shift, ROWS: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr):
    """Return how many tiles of BN keys the queries from `first` on look at: at least one, be it hidden as a whole."""
    n = (keys + BN - 1) // BN
    if CAUSAL:
        n = gl.minimum(n, (first + ROWS + shift + BN - 1) // BN)
    return gl.maximum(n, 1)


@gluon.jit
def first_query_tile(first, shift, BM: gl.constexpr, CAUSAL: gl.constexpr):
    """Return the first tile of BM queries that sees a key from `first` on."""
    m = 0
    if CAUSAL:
        m = gl.maximum(first - shift, 0) // BM
    return m


@gluon.jit
def load_tile(desc, y, head, x, column, barrier, buffer, RAGGED: gl.constexpr):
    """Start copying rows of one head into shared memory; rows past the sequence's end become 0."""
    wrap = 0
    if RAGGED:
        wrap = BEYOND
    target = buffer.reshape(desc.block_shape)
    tma_load(desc, [wrap, y, head, x, column], barrier, target)


@gluon.jit
def store_tile(desc, y, head, x, buffer, RAGGED: gl.constexpr):
    """Start copying rows of one head from shared memory; rows past the sequence's end are left alone."""
    wrap = 0
    if RAGGED:
        wrap = BEYOND
    tma_store(desc, [wrap, y, head, x, 0], buffer.reshape(desc.block_shape))


@gluon.jit
def add_bias(s, table, corner, N: gl.constexpr, SL: gl.constexpr):
    """Return s[i, j] + table[corner + j - i] for a [64, N] accumulator.

    The table holds pairs (t[d], t[d + 1]), so two neighbouring columns take one aligned 8-byte load. The index is split
    into a part that is one value a thread and a part that is a constant of each register (row bit 8 and pair bits
    above 2 are register bits of the accumulator's layout): one base address and immediate offsets. As row r + 8 reads
    what row r reads 8 columns earlier, the compiler merges 32 loads into 17. No clamp: the table is padded.
    """
    even, odd = gl.split(s.reshape([64, N // 2, 2]))
    L: gl.constexpr = even.type.layout
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, L))[:, None]
    pair = gl.arange(0, N // 2, layout=gl.SliceLayout(0, L))[None, :]
    base = (table + (corner + 2 * (pair & 3) - (row & 55))).to(gl.int64)
    address = base + (2 * (pair & 124) - (row & 8)).to(gl.int64) * 8
    first, second = gl.inline_asm_elementwise(
        "ld.global.nc.v2.f32 {$0,$1},[$2];", "=f,=f,l", [address], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
    )
    return gl.convert_layout(gl.join(even + first, odd + second).reshape([64, N]), SL)


@gluon.jit
def table_ends(table, head, factor, width, BIAS: gl.constexpr):
    """Return the first and last value of a head's table, times `factor`; 0 without a bias."""
    first = 0.0
    last = 0.0
    if BIAS:
        values = (table + head * width).cast(gl.pointer_type(gl.float32))
        first = gl.load(values) * factor
        last = gl.load(values + 2 * width - 1) * factor
    return first, last
