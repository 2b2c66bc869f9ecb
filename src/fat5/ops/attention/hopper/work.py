"""What a Hopper kernel is launched with beside its tensors: its tiles, who takes them, and the table of the bias."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from fat5.ops.attention.hopper.chain import Chain
from fat5.ops.attention.hopper.configuration import KEY_TILE, TURNS_A_CHUNK, Configuration
from fat5.ops.attention.hopper.plan import Parts, Tiles, share_out, table_shape, write_records, write_table
from fat5.ops.attention.hopper.records import FIELDS
from fat5.ops.attention.problem import Problem


@dataclasses.dataclass(frozen=True)
class Work:
    """Tiles of queries or of keys, and who takes them.

    Attributes:
        programs: Size of the grid.
        slots: Numbers of tiles of one head, in all sequences.
        table: The bias by distance, in pairs.
        records: The tiles of a ragged batch, in the order of their programs; else never read.
        scalars: What else the kernels need to find their tiles and read the table.
    """

    programs: int
    slots: int
    table: Tensor
    records: Tensor
    scalars: dict[str, int]


def plan_queries(
    problem: Problem, configuration: Configuration, rows: int, pitch: int, padded: bool, programs: int, chain: Chain,
    parts: Parts,
) -> Work:  # fmt: skip
    """Plan tiles of `rows` queries for the forward, or (`padded`) for the query kernel of the backward.

    Args:
        problem: The attention.
        configuration: Its constants.
        rows: Queries of a tile.
        pitch: Rows of a head in the arrays that the kernel indexes by query.
        padded: Whether their sequences start at multiples of 64.
        programs: Most programs.
        chain: The launches of this call.
        parts: What a plan holds of it.
    """
    tiles = share_out(problem, rows, programs, keys=False)
    records = None if padded else parts.get("queries")
    if records is None and configuration.ragged:
        records = _empty_records(problem, tiles)
        write_records(problem, records, tiles, pitch, chain, padded=padded)
    return _work(problem, configuration, tiles, pitch, configuration.shape.chunk, chain, parts.get("table"), records)


def plan_keys(
    problem: Problem, configuration: Configuration, pitch: int, programs: int, chain: Chain, parts: Parts,
    row_map: Tensor | None,
) -> Work:  # fmt: skip
    """Plan tiles of 128 keys for the backward kernel, whose table is reversed.

    Where no plan has their records, the map of padded rows is written with them.
    """
    tiles = share_out(problem, KEY_TILE, programs, keys=True)
    records = parts.get("keys")
    if records is None and configuration.ragged:
        records = _empty_records(problem, tiles)
        write_records(problem, records, tiles, pitch, chain, padded=True, row_map=row_map)
    return _work(problem, configuration, tiles, pitch, TURNS_A_CHUNK, chain, parts.get("reversed"), records)


def _work(
    problem: Problem, configuration: Configuration, tiles: Tiles, pitch: int, chunk: int, chain: Chain,
    table: Tensor | None, records: Tensor | None,
) -> Work:  # fmt: skip
    shape = table_shape(problem, keys=tiles.keys)
    if table is None and configuration.bias:
        table = problem.q.new_empty(shape, dtype=torch.float32)
        write_table(problem, table, chain, keys=tiles.keys)
    if table is None:
        table = problem.q.new_empty(1, 1, 2, dtype=torch.float32)
    return Work(
        programs=tiles.programs,
        slots=tiles.slots,
        table=table.view(torch.int64)[..., 0],  # pairs
        records=table.view(torch.int32) if records is None else records,  # not read
        scalars={
            "span": shape[1] // 2,
            "tiles": tiles.tiles,
            "blocks": tiles.blocks,
            "H": problem.heads,
            "M": problem.num_queries,
            "N": problem.num_keys,
            "shift": problem.offset or 0,
            "pitch": pitch,
            "turns": tiles.turns,
            "chunk": chunk * tiles.programs,
        },
    )


def _empty_records(problem: Problem, tiles: Tiles) -> Tensor:
    return torch.empty(tiles.turns, tiles.programs, FIELDS.value, dtype=torch.int32, device=problem.q.device)
