"""What is made for each launch of a Hopper kernel: the table of the bias, and the tiles of each program."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from fat5.ops.attention.hopper import setup
from fat5.ops.attention.hopper.configuration import EVERYWHERE, KEY_TILE, TURNS_A_CHUNK, Configuration
from fat5.ops.attention.hopper.records import KEY_TILES, QUERY_TILES, make_records
from fat5.ops.attention.hopper.row_map import Beside
from fat5.ops.attention.hopper.support import radius_of
from fat5.ops.attention.problem import Problem
from fat5.ops.attention.tile_scores import END_OFFSET, OWN_OFFSET, SHARED_OFFSET
from fat5.ops.dependent_launch import dependent_launch, follower_options
from fat5.ops.prepared_launch import PreparedLaunch, PreparedLaunches, ceil_divide

_BIAS_KINDS = {
    "none": setup.NONE.value,
    "distance": setup.DISTANCE.value,
    "alibi": setup.ALIBI.value,
    "alibi-signed": setup.ALIBI_SIGNED.value,
}
_SETUP_BLOCK = 512
_setups = PreparedLaunches()
GROUP = 8
"""Blocks of 128 keys whose near tiles of dS are added up in the type of q: 16 additions bound a sum's rounding."""


class Chain:
    """The launches of one call that may start ahead of the end of the kernel before them.

    On Hopper a kernel launched so starts when every program of the one before has announced that it may
    (`gdc_launch_dependents`) or has ended; it prepares what does not depend on that one, and waits (`await_previous`).
    The first kernel of a chain is launched the common way, after all work before. Each kernel waits in each program, so
    that the end of one is the end of all before it, and none writes before it waits: memory of its own may be filled by
    PyTorch until then, under deterministic algorithms.
    """

    def __init__(self, device: torch.device) -> None:
        self._early = dependent_launch(device)
        self._options = follower_options(device) if self._early else {}
        self._begun = False

    def link(self) -> dict[str, Any]:
        """Return the options of the next launch of a Triton kernel."""
        return {"CHAIN": self._early} | self.start()

    def start(self) -> dict[str, Any]:
        """Return the options of the next launch of a Gluon kernel, which waits in any case."""
        begun, self._begun = self._begun, True
        return self._options if begun else {}

    def end(self) -> None:
        """Have the next launch start after all before it: some other kernel came between."""
        self._begun = False


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


def table_span(problem: Problem, radius: int, columns: int) -> int:
    """Return how far a table reaches either side of distance 0.

    Beyond the radius, or the largest distance of any query and key, come as many entries as a tile of 64 rows and
    `columns` columns can stick out.
    """
    if radius != EVERYWHERE:
        return radius + columns + 64
    farthest = max(problem.num_keys, problem.num_queries + abs(problem.offset or 0))
    return 64 * ceil_divide(farthest + 320, 64)


def plan_queries(
    problem: Problem, configuration: Configuration, rows: int, pitch: int, padded: bool, programs: int, chain: Chain,
    beside: Beside,
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
        beside: What the record kernel of a ragged batch writes besides.
    """
    span = table_span(problem, configuration.radius, KEY_TILE)
    chunk = configuration.shape.chunk
    return _plan(
        problem, configuration, "queries", rows, pitch, padded, programs, chunk, span, chain, beside, reverse=False
    )


def plan_keys(
    problem: Problem, configuration: Configuration, pitch: int, programs: int, chain: Chain, beside: Beside
) -> Work:
    """Plan tiles of 128 keys for the backward kernel; its table is reversed."""
    span = table_span(problem, configuration.radius, 64)
    return _plan(
        problem, configuration, "keys", KEY_TILE, pitch, True, programs, TURNS_A_CHUNK, span, chain, beside,
        reverse=True,
    )  # fmt: skip


def _plan(
    problem: Problem, configuration: Configuration, what: str, rows: int, pitch: int, padded: bool, programs: int,
    chunk: int, span: int, chain: Chain, beside: Beside, *, reverse: bool,
) -> Work:  # fmt: skip
    device, heads, causal = problem.q.device, problem.heads, configuration.causal
    length = problem.num_queries if what == "queries" else problem.num_keys
    blocks = ceil_divide(length, rows)
    slots = problem.batch * blocks
    if problem.cu_seqlens_q is not None:
        slots += problem.cu_seqlens_q.shape[0] - 1  # each document may end inside a tile
    tiles = slots * heads
    programs = min(programs, tiles)
    turns = ceil_divide(tiles, programs)
    table = _empty_table(problem, configuration, span)
    records = table.view(torch.int32)  # not read
    row_slots = 0
    if configuration.ragged:
        kind = QUERY_TILES if what == "queries" else KEY_TILES
        arguments = _sequences(problem) | {"KIND": kind.value, "PADDED": padded, "pitch": pitch}
        if not problem.packed:  # a row's blocks fill whole groups, so that no group has two rows
            row_slots = GROUP * ceil_divide(blocks, GROUP)
        arguments["row_slots"] = row_slots
        records = make_records(arguments, device, slots, heads, programs, causal, beside, chain.link())
        slots = slots if problem.packed else problem.batch * row_slots
    if configuration.bias:
        options = chain.link()
        key = problem.signature, span, reverse, *options.items()
        _setups.get(key, lambda: _prepare_setup(problem, span, reverse, options))(problem.bias, table)
    return Work(
        programs=programs,
        slots=slots,
        table=table.view(torch.int64)[..., 0],  # pairs
        records=records,
        scalars={
            "span": span,
            "tiles": tiles,
            "blocks": blocks,
            "H": heads,
            "M": problem.num_queries,
            "N": problem.num_keys,
            "shift": problem.offset or 0,
            "pitch": pitch,
            "turns": turns,
            "chunk": chunk * programs,
        },
    )


def _prepare_setup(problem: Problem, span: int, reverse: bool, options: dict[str, Any]) -> PreparedLaunch:
    return PreparedLaunch(
        setup.setup_kernel, (ceil_divide(2 * span, _SETUP_BLOCK), problem.heads), scale=problem.softmax_scale,
        span=span, RADIUS=radius_of(problem), BIAS=_BIAS_KINDS[problem.bias_kind], CAUSAL=problem.causal,
        REVERSED=reverse, BLOCK=_SETUP_BLOCK, **options,
    )  # fmt: skip


def _empty_table(problem: Problem, configuration: Configuration, span: int) -> Tensor:
    size = (problem.heads, 2 * span, 2) if configuration.bias else (1, 1, 2)
    return problem.q.new_empty(size, dtype=torch.float32)


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
