"""The records of a ragged batch: one for each tile of work, made on the device without looking at any length on the
host. The same launch writes the map of padded rows, see `row_map.py`.

A ragged batch has rows or documents of different lengths, or keys that are not real. A sequence is then a stretch of
query rows and a stretch of real keys, wherever they lie; positions are moved so that its first real key stands at 0.
Packed rows behind the last document are one more sequence, of queries without keys, or of keys without queries: so the
tiles write what belongs there, 0, and infinity in the log-sum-exp.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fat5.ops.attention.hopper.row_map import map_rows
from fat5.ops.attention.tile_scores import sequence_bounds
from fat5.ops.dependent_launch import gdc_launch_dependents, gdc_wait
from fat5.ops.prepared_launch import Relaunched, ceil_divide, ceil_power_of_2

FIELDS = tl.constexpr(16)
BEYOND = tl.constexpr(2**30)
"""Rows end at this index in a descriptor of sequences, see `descriptors.py`."""

QUERY_TILES = tl.constexpr(0)
KEY_TILES = tl.constexpr(1)

_SHARE = 16  # records, or entries of the map, that a program writes


@triton.jit
def _floor_divide(a, b: tl.constexpr):
    return (a + b * 1048576) // b - 1048576  # the device rounds to 0; no length has so many tiles


@triton.jit
def _tiles_above(cost, blocks, low, high, base, SLOPE: tl.constexpr):
    """Count a sequence's tiles that cost more than `cost`, where tile b costs clamp(base + SLOPE * b, low, high)."""
    if SLOPE == 0:
        count = blocks
    elif SLOPE > 0:
        count = blocks - tl.maximum(cost - base + 1, 0)
    else:
        count = (tl.maximum(base - cost, 0) + 1) // 2  # SLOPE is -2
    count = tl.minimum(tl.maximum(count, 0), blocks)
    return tl.where(cost < low, blocks, tl.where(high > cost, count, 0))


@triton.jit
def write_records(
    Records,
    CuQ,
    CuK,
    KeyStarts,
    KeyLengths,
    Offsets,
    offset,
    M,
    N,
    sequences,
    heads,
    programs,
    places,
    pitch,
    row_slots,
    group,
    KIND: tl.constexpr,
    PADDED: tl.constexpr,
    CAUSAL: tl.constexpr,
    VARLEN: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    SLOTS: tl.constexpr,
    SHARE: tl.constexpr,
):
    """Write the records of SHARE tiles of one head, in the order in which programs take them.

    Tiles are 128 queries or 128 keys. Those of the last `group` of heads are sorted by falling work, so that the
    shortest end the launch, of the group before by rising work, and so on by turns; heads of one tile lie side by side.
    They are dealt forth and back: position p goes to turn p // programs.
    Positions beyond the last tile have no head (-1). Fields: head,
    first row in the sequence, y and x of its first query, y and x of its first real key, queries, keys, shift
    (position of the first query, from the first real key), its first row in the arrays [.., H, pitch] (PADDED: where
    sequences start at multiples of 64), number of the tile:
    running over documents, or from row to row by `row_slots`.
    """
    SLOPE: tl.constexpr = (1 if KIND == QUERY_TILES else -2) if CAUSAL else 0
    lanes = tl.arange(0, SLOTS)
    real = lanes < sequences
    if VARLEN:
        real = lanes <= sequences
    seq = tl.minimum(lanes, sequences - 1)
    q_first, k_first, queries, start, end, shift = sequence_bounds(
        seq, CuQ, CuK, KeyStarts, KeyLengths, Offsets, offset, M, N, VARLEN, OFFSET, HAS_STARTS, HAS_LENGTHS
    )
    zeros = tl.zeros([SLOTS], tl.int32)
    queries = tl.where(real, queries + zeros, 0)
    keys = tl.where(real, end - start + zeros, 0)
    shift = shift - start + zeros
    if VARLEN:
        q_row = q_first.to(tl.int32)
        k_row = k_first.to(tl.int32) + start
        unused = lanes == sequences  # behind the last document, which `seq` is there
        q_row += tl.where(unused, queries, 0)
        k_row += tl.where(unused, keys, 0)
        queries = tl.where(unused, M - q_row if KIND == QUERY_TILES else 0, queries)
        keys = tl.where(unused, N - k_row if KIND == KEY_TILES else 0, keys)
        shift = tl.where(unused, 0, shift)
        padded = tl.cumsum((queries + 63) // 64, 0) * 64 - (queries + 63) // 64 * 64
        rows = padded if PADDED else q_row
    else:
        q_row = seq * M
        k_row = seq * N + start
        rows = seq * heads * pitch
    if KIND == QUERY_TILES:
        blocks = (queries + 127) // 128
        low = zeros + 1
        high = tl.maximum((keys + 127) // 128, 1)
        base = 1 + _floor_divide(shift + 127, 128)
    else:
        blocks = (keys + 127) // 128
        low = zeros
        high = (queries + 63) // 64
        base = high - _floor_divide(-shift, 64)
    upto = tl.cumsum(blocks, 0)
    total = tl.sum(blocks, 0)

    tile = tl.program_id(0) * SHARE + tl.arange(0, SHARE)
    head = tl.program_id(1)
    before = (upto[None, :] <= tile[:, None]) & real[None, :]  # [SHARE, SLOTS]
    document = tl.sum(before.to(tl.int32), 1)
    own = document[:, None] == lanes[None, :]
    block = tile - tl.sum(tl.where(before, blocks[None, :], 0), 1)
    own_blocks = tl.sum(tl.where(own, blocks[None, :], 0), 1)
    own_low = tl.sum(tl.where(own, low[None, :], 0), 1)
    own_high = tl.sum(tl.where(own, high[None, :], 0), 1)
    own_base = tl.sum(tl.where(own, base[None, :], 0), 1)
    cost = own_high
    if SLOPE != 0:
        cost = tl.minimum(tl.maximum(own_base + SLOPE * block, own_low), own_high)
    above = _tiles_above(cost[:, None], blocks[None, :], low[None, :], high[None, :], base[None, :], SLOPE)
    at_least = _tiles_above(cost[:, None] - 1, blocks[None, :], low[None, :], high[None, :], base[None, :], SLOPE)
    rank = tl.sum(above, 1) + tl.sum(tl.where(before, at_least - above, 0), 1)
    if SLOPE >= 0:  # the tiles of a sequence that cost less come first in it
        rank += block - own_blocks + tl.sum(tl.where(own, at_least, 0), 1)
    else:
        rank += block - tl.sum(tl.where(own, above, 0), 1)

    used = tile < total
    first_head = head // group * group
    rank = tl.where(((heads - 1) // group - head // group) % 2 == 1, total - 1 - rank, rank)
    position = first_head * total + rank * tl.minimum(group, heads - first_head) + head - first_head
    position = tl.where(used, position, tile * heads + head)
    turn = position // programs
    program = position % programs
    program = tl.where(turn % 2 == 1, programs - 1 - program, program)
    record = Records + (turn * programs + program) * FIELDS
    inside = position < places
    tl.store(record, tl.where(used, head, -1), mask=inside)
    inside = inside & used
    own_queries = tl.sum(tl.where(own, queries[None, :], 0), 1)
    own_keys = tl.sum(tl.where(own, keys[None, :], 0), 1)
    tl.store(record + 1, block * 128, mask=inside)
    tl.store(record + 2, tl.sum(tl.where(own, q_row[None, :], 0), 1) + own_queries, mask=inside)
    tl.store(record + 3, BEYOND - own_queries, mask=inside)
    tl.store(record + 4, tl.sum(tl.where(own, k_row[None, :], 0), 1) + own_keys, mask=inside)
    tl.store(record + 5, BEYOND - own_keys, mask=inside)
    tl.store(record + 6, own_queries, mask=inside)
    tl.store(record + 7, own_keys, mask=inside)
    tl.store(record + 8, tl.sum(tl.where(own, shift[None, :], 0), 1), mask=inside)
    tl.store(record + 9, tl.sum(tl.where(own, rows[None, :], 0), 1), mask=inside)
    tl.store(record + 10, tile if VARLEN else document * row_slots + block, mask=inside)


@triton.jit(do_not_specialize=["record_programs", "group"])
def record_kernel(
    Records,
    CuQ,
    CuK,
    KeyStarts,
    KeyLengths,
    Offsets,
    offset,
    M,
    N,
    sequences,
    heads,
    programs,
    places,
    pitch,
    row_slots,
    group,
    Map,
    map_blocks,
    record_programs,
    KIND: tl.constexpr,
    PADDED: tl.constexpr,
    CAUSAL: tl.constexpr,
    VARLEN: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    SLOTS: tl.constexpr,
    SHARE: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """Two jobs side by side, by the first index of a program; the second is the head.

    `record_programs` write records, see `write_records`, the others the map of padded rows, see `map_rows`.
    """
    if CHAIN:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    head = tl.program_id(1)
    if program < record_programs:
        write_records(
            Records, CuQ, CuK, KeyStarts, KeyLengths, Offsets, offset, M, N, sequences, heads, programs, places, pitch,
            row_slots, group, KIND, PADDED, CAUSAL, VARLEN, OFFSET, HAS_STARTS, HAS_LENGTHS, SLOTS, SHARE,
        )  # fmt: skip
    elif Map is not None:
        map_rows(Map, map_blocks, CuQ, M, sequences, SHARE, SLOTS, (program - record_programs) * heads + head)


_record_kernel = Relaunched(record_kernel)


def make_records(
    records: Tensor,
    arguments: dict[str, Any],
    heads: int,
    causal: bool,
    *,
    group: int | None = None,
    row_map: Tensor | None = None,
    options: dict[str, Any] | None = None,
) -> None:
    """Write the records [turns, programs, FIELDS] int32 of tiles, which a bound that the host knows has room for.

    Args:
        records: Where.
        arguments: Of `record_kernel`: offsets, lengths, sizes, and their constants.
        heads: Number of heads.
        causal: Later keys are hidden.
        group: Heads whose tiles are sorted together; by default all.
        row_map: Where to write the map of padded rows [blocks, 2] int32, if anywhere.
        options: Of the launch, from its chain; by default it has none.
    """
    turns, programs, _ = records.shape
    places = turns * programs
    slots = max(16, ceil_power_of_2(arguments["sequences"] + arguments["VARLEN"]))
    share = max(1, min(_SHARE, 16384 // slots))
    record_programs = ceil_divide(ceil_divide(places, heads), share)
    map_blocks = 0 if row_map is None else row_map.shape[0]
    map_programs = ceil_divide(ceil_divide(map_blocks, share), heads)
    _record_kernel[(record_programs + map_programs, heads)](
        records, heads=heads, programs=programs, places=places, group=group or heads, Map=row_map,
        map_blocks=map_blocks, record_programs=record_programs, CAUSAL=causal, SLOTS=slots, SHARE=share, **arguments,
        **(options or {"CHAIN": False}),
    )  # fmt: skip
