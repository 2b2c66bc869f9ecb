"""The kernel that runs ahead of a Hopper kernel: it writes the bias by distance and, where tiles differ in work, who
takes which tile.

Both in one launch, and anew for each call: nothing that lives on the device outlasts a call, which CUDA graphs would
forbid.
"""

from __future__ import annotations

import triton
import triton.language as tl

NONE = tl.constexpr(0)
DISTANCE = tl.constexpr(1)
ALIBI = tl.constexpr(2)
ALIBI_SIGNED = tl.constexpr(3)

TURNS_A_CHUNK = tl.constexpr(4)
"""Tiles are sorted by work inside chunks of so many turns: few heads at a time, whose keys and values stay in the
L2."""


@triton.jit
def _bias_at(distance, Bias, head, scale, RADIUS: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the bias over the scale at each distance, -inf where causal attention hides it."""
    values = tl.zeros(distance.shape, tl.float32)
    if BIAS == DISTANCE:
        place = tl.minimum(tl.maximum(distance, -RADIUS), RADIUS) + RADIUS
        values = tl.load(Bias + head * (2 * RADIUS + 1) + place) / scale
    elif BIAS == ALIBI:
        values = tl.load(Bias + head) * -tl.abs(distance).to(tl.float32) / scale
    elif BIAS == ALIBI_SIGNED:
        values = tl.load(Bias + head) * distance.to(tl.float32) / scale
    if CAUSAL:
        values = tl.where(distance > 0, -float("inf"), values)
    return values


@triton.jit
def setup_kernel(
    Bias,
    Table,
    Schedule,
    scale,
    span,
    table_programs,
    heads,
    tiles,
    blocks,
    programs,
    turns,
    RADIUS: tl.constexpr,
    BIAS: tl.constexpr,
    CAUSAL: tl.constexpr,
    REVERSED: tl.constexpr,
    FALLING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the table, `table_programs` programs a head, and with the programs beyond those the schedule.

    Table: [H, 2 * span] pairs (t[d], t[d + 1]) for d from -span, or REVERSED (t[-d], t[-d - 1]); t is the bias over the
    scale. A causal table hides positive distances, so that no kernel has a causal mask.

    Schedule: [turns, programs], the tile that each program takes in each turn, or -1. Tile `head * blocks + block` is
    worth `block` (FALLING: `blocks - block`) units of work, up to a constant. Each chunk of TURNS_A_CHUNK turns takes
    the tiles next in order, sorted by falling work, and deals them forth and back.
    """
    lanes = tl.arange(0, BLOCK)
    program = tl.program_id(0)
    if program < table_programs * heads:
        head = program // table_programs
        entry = program % table_programs * BLOCK + lanes
        distance = entry - span
        step = 1
        if REVERSED:
            distance = -distance
            step = -1
        first = _bias_at(distance, Bias, head, scale, RADIUS, BIAS, CAUSAL)
        second = _bias_at(distance + step, Bias, head, scale, RADIUS, BIAS, CAUSAL)
        pairs = Table + (head.to(tl.int64) * 2 * span + entry) * 2
        tl.store(pairs, first, mask=entry < 2 * span)
        tl.store(pairs + 1, second, mask=entry < 2 * span)
    else:
        place = (program - table_programs * heads) * BLOCK + lanes
        begin = place // (TURNS_A_CHUNK * programs) * (TURNS_A_CHUNK * programs)
        end = tl.minimum(begin + TURNS_A_CHUNK * programs, tiles)
        rise = place % blocks  # rank of its work
        first_head = begin // blocks
        last_head = end // blocks
        first_rise = begin % blocks
        end_rise = end % blocks
        above = tl.maximum(blocks - tl.maximum(rise + 1, first_rise), 0)
        above += (last_head - first_head - 1) * (blocks - 1 - rise) + tl.maximum(end_rise - rise - 1, 0)
        within = tl.maximum(end_rise - tl.maximum(rise + 1, first_rise), 0)
        above = tl.where(first_head == last_head, within, above)
        own = place // blocks
        equal = own - first_head - ((own > first_head) & (rise < first_rise)).to(tl.int32)
        used = place < tiles
        position = tl.where(used, begin + above + equal, place)
        turn = position // programs
        program_of = position % programs
        program_of = tl.where(turn % 2 == 1, programs - 1 - program_of, program_of)
        if FALLING:
            rise = blocks - 1 - rise
        tile = tl.where(used, own * blocks + rise, -1)
        tl.store(Schedule + turn * programs + program_of, tile, mask=place < turns * programs)
