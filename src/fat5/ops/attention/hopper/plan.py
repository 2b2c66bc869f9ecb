"""What the kernels read that depends on lengths and bias alone: records, the map of padded rows, and the table.

A call makes it for itself, or finds it in a plan that was made once for all calls with the same lengths and bias, one
int32 tensor. Nothing else remembers it: a plan is an argument, and lives as long as its owner wants.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from fat5.ops.attention.hopper import setup
from fat5.ops.attention.hopper.chain import Chain
from fat5.ops.attention.hopper.configuration import EVERYWHERE, KEY_TILE, table_radius
from fat5.ops.attention.hopper.records import FIELDS, KEY_TILES, QUERY_TILES, make_records
from fat5.ops.attention.hopper.support import is_ragged, radius_of
from fat5.ops.attention.problem import Problem
from fat5.ops.attention.tile_scores import END_OFFSET, OWN_OFFSET, SHARED_OFFSET
from fat5.ops.prepared_launch import PreparedLaunch, PreparedLaunches, ceil_divide

GROUP = 8
"""Blocks of 128 keys whose near tiles of dS are added up in the type of q: 16 additions bound a sum's rounding."""

QUERY_ROWS = 128
"""Queries of a tile that has a record."""

_BIAS_KINDS = {
    "none": setup.NONE.value,
    "distance": setup.DISTANCE.value,
    "alibi": setup.ALIBI.value,
    "alibi-signed": setup.ALIBI_SIGNED.value,
}
_SETUP_BLOCK = 512
_ALIGNMENT = 32  # int32: each part of a plan starts at 128 bytes
_HEAD_GROUPS = 3  # of causal tiles, at most
_TURNS_A_GROUP = {True: 4, False: 8}  # at least; of tiles of keys, which read more, and of queries
_setups = PreparedLaunches()

Parts = dict[str, Tensor]
"""By name, as far as they are there: "table" and "reversed", the bias by distance [H, 2 * span, 2] float32; "queries"
and "keys", records [turns, programs, FIELDS]; "map", of padded rows [blocks, 2]."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How tiles of queries or of keys are shared out.

    Attributes:
        keys: They are of keys.
        blocks: Tiles of a row, or of the packed batch were it one document.
        slots: Numbers of tiles of one head, in all sequences.
        row_slots: Numbers of tiles of a ragged row: whole groups, so that no group has two rows; 0 for documents.
        tiles: Most tiles, of all heads.
        programs: Size of the grid.
    """

    keys: bool
    blocks: int
    slots: int
    row_slots: int
    tiles: int
    programs: int

    @property
    def turns(self) -> int:
        """Tiles that a program takes, at most."""
        return ceil_divide(self.tiles, self.programs)


def share_out(problem: Problem, rows: int, programs: int, *, keys: bool) -> Tiles:
    """Share tiles of `rows` queries, or of keys, among at most `programs` programs."""
    blocks = ceil_divide(problem.num_keys if keys else problem.num_queries, rows)
    slots = problem.batch * blocks
    if problem.cu_seqlens_q is not None:
        slots += problem.cu_seqlens_q.shape[0] - 1  # each document may end inside a tile
    tiles = slots * problem.heads
    row_slots = 0
    if is_ragged(problem) and not problem.packed:
        row_slots = GROUP * ceil_divide(blocks, GROUP)
        slots = problem.batch * row_slots
    return Tiles(keys, blocks, slots, row_slots, tiles, min(programs, tiles))


def row_blocks(problem: Problem) -> int:
    """Return the blocks of 64 padded queries of a row, or of a packed batch."""
    blocks = ceil_divide(problem.num_queries, 64)
    if problem.cu_seqlens_q is not None:
        blocks += problem.cu_seqlens_q.shape[0] - 1  # each document may end inside a block
    return blocks


def table_span(problem: Problem, columns: int) -> int:
    """Return how far a table reaches either side of distance 0.

    Beyond the radius, or the largest distance of any query and key, come as many entries as a tile of 64 rows and
    `columns` columns can stick out.
    """
    radius = table_radius(problem)
    if radius != EVERYWHERE:
        return radius + columns + 64
    farthest = max(problem.num_keys, problem.num_queries + abs(problem.offset or 0))
    return 64 * ceil_divide(farthest + 320, 64)


def table_shape(problem: Problem, *, keys: bool) -> tuple[int, int, int]:
    """Return the shape of the table that tiles of queries, or of keys, read."""
    return problem.heads, 2 * table_span(problem, 64 if keys else KEY_TILE), 2


def write_table(problem: Problem, table: Tensor, chain: Chain, *, keys: bool) -> None:
    """Write the bias by distance, in pairs, for tiles of queries or, reversed, of keys."""
    options, span = chain.link(), table.shape[1] // 2

    def prepare() -> PreparedLaunch:
        return PreparedLaunch(
            setup.setup_kernel, (ceil_divide(2 * span, _SETUP_BLOCK), problem.heads), scale=problem.softmax_scale,
            span=span, RADIUS=radius_of(problem), BIAS=_BIAS_KINDS[problem.bias_kind], CAUSAL=problem.causal,
            REVERSED=keys, BLOCK=_SETUP_BLOCK, **options,
        )  # fmt: skip

    _setups.get((problem.signature, span, keys, *options.items()), prepare)(problem.bias, table)


def write_records(
    problem: Problem, records: Tensor, tiles: Tiles, pitch: int, chain: Chain, *, padded: bool,
    row_map: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the records of tiles, and the map of padded rows where one is given.

    Args:
        problem: The attention.
        records: Where.
        tiles: Their number, and who takes them.
        pitch: Rows of a head in the arrays that the kernel indexes by query.
        chain: The launches of this call.
        padded: Whether sequences start at multiples of 64 in these.
        row_map: Where to write the map.
    """
    kind = KEY_TILES if tiles.keys else QUERY_TILES
    arguments = _sequences(problem) | {
        "KIND": kind.value, "PADDED": padded, "pitch": pitch, "row_slots": tiles.row_slots
    }  # fmt: skip
    make_records(
        records, arguments, problem.heads, problem.causal, group=_heads_together(problem, tiles), row_map=row_map,
        options=chain.link(),
    )  # fmt: skip


def _heads_together(problem: Problem, tiles: Tiles) -> int:
    """Return the heads whose tiles are sorted by work together.

    Sorted over all heads, causal tiles of one document are far apart, and each finds what another one read in the L2 no
    more: of keys its queries, their output's gradient and the sums of dQ, of queries its keys and values.
    """
    if problem.causal and tiles.turns >= _HEAD_GROUPS * _TURNS_A_GROUP[tiles.keys]:
        return ceil_divide(problem.heads, _HEAD_GROUPS)
    return problem.heads


def size(problem: Problem, programs: int, *, backward: bool) -> int:
    """Return the length of a plan, 0 where there is nothing to plan."""
    return sum(_room(shape) for shape in _shapes(problem, programs, backward).values())


def make(problem: Problem, programs: int, *, backward: bool) -> Tensor:
    """Return a plan of the forward and, if asked for, of the backward."""
    shapes = _shapes(problem, programs, backward)
    plan = torch.empty(size(problem, programs, backward=backward), dtype=torch.int32, device=problem.q.device)
    parts, chain = _parts(plan, shapes), Chain(plan.device)
    for keys, table, records in ((False, "table", "queries"), (True, "reversed", "keys")):
        if table in parts:
            write_table(problem, parts[table], chain, keys=keys)
        if records in parts:
            tiles = share_out(problem, KEY_TILE if keys else QUERY_ROWS, programs, keys=keys)
            pitch = 64 * row_blocks(problem) if keys else problem.num_queries
            row_map = parts.get("map") if keys else None
            write_records(problem, parts[records], tiles, pitch, chain, padded=keys, row_map=row_map)
    return plan


def planned(problem: Problem, programs: int) -> Parts:
    """Return what the problem's plan holds: nothing without one, or where it is of another length."""
    plan = problem.plan
    if plan is not None and plan.numel() > 0:
        for backward in (True, False):
            if plan.numel() == size(problem, programs, backward=backward):
                return _parts(plan, _shapes(problem, programs, backward))
    return {}


def _shapes(problem: Problem, programs: int, backward: bool) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    ragged = is_ragged(problem)
    for keys in (False, True)[: 1 + backward]:
        if problem.bias is not None or problem.causal:
            found["reversed" if keys else "table"] = table_shape(problem, keys=keys)
        if ragged:
            tiles = share_out(problem, KEY_TILE if keys else QUERY_ROWS, programs, keys=keys)
            found["keys" if keys else "queries"] = (tiles.turns, tiles.programs, FIELDS.value)
    if backward and problem.packed:
        found["map"] = (row_blocks(problem), 2)
    return found


def _room(shape: tuple[int, ...]) -> int:
    return _ALIGNMENT * ceil_divide(math.prod(shape), _ALIGNMENT)


def _parts(plan: Tensor, shapes: dict[str, tuple[int, ...]]) -> Parts:
    parts, begin = {}, 0
    for name, shape in shapes.items():
        part = plan.narrow(0, begin, math.prod(shape)).view(shape)
        parts[name] = part.view(torch.float32) if name in ("table", "reversed") else part
        begin += _room(shape)
    return parts


def _sequences(problem: Problem) -> dict[str, Any]:
    """Return the arguments of the record kernel that say which rows are one sequence."""
    offset = SHARED_OFFSET
    if problem.offsets is not None:
        offset = OWN_OFFSET
    elif problem.offset is None:
        offset = END_OFFSET
    sequences = problem.batch if problem.cu_seqlens_q is None else problem.cu_seqlens_q.shape[0] - 1
    return {
        "CuQ": problem.cu_seqlens_q,
        "CuK": problem.cu_seqlens_k,
        "KeyStarts": problem.key_starts,
        "KeyLengths": problem.key_lengths,
        "Offsets": problem.offsets,
        "offset": problem.offset or 0,
        "M": problem.num_queries,
        "N": problem.num_keys,
        "sequences": sequences,
        "VARLEN": problem.packed,
        "OFFSET": offset.value,
        "HAS_STARTS": problem.key_starts is not None,
        "HAS_LENGTHS": problem.key_lengths is not None,
    }
