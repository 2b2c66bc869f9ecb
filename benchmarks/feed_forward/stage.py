"""What is timed, in what order, and the float64 answers that it is held against."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.attention.gate import FORWARD_FACTOR, poisoned_memory
from benchmarks.elementwise import own_unavailable
from benchmarks.session import Session
from benchmarks.subject import GateError, Phase, Prepared, Subject
from fat5.ops.activation.reference import gated_gelu_reference
from fat5.ops.feed_forward.choice import card_can_fuse

YARDSTICK = "two kernels"

_LARGEST_LIMIT = 0.1  # a limit near 1 would let zeros pass

Rows = list[dict[str, Any]]
Tensors: TypeAlias = tuple[Tensor, Tensor]


@dataclass(eq=False)
class Stage:
    """One size of a layer: x [tokens, d_model] times both weights' joined [2 d_ff, d_model]."""

    tokens: int
    d_model: int
    d_ff: int
    device: torch.device
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        generator = torch.Generator(self.device).manual_seed(0)
        normal = functools.partial(torch.randn, generator=generator, device=self.device, dtype=self.dtype)
        self.x = normal(self.tokens, self.d_model)
        self.weight = normal(2 * self.d_ff, self.d_model) * self.d_model**-0.5

    def two_kernels(self) -> Tensors:
        """Return the projection by a product of cuBLAS, and the activation by the kernel behind it."""
        from fat5.ops.activation.custom_ops import triton_joined_gated_gelu

        joined = F.linear(self.x, self.weight)
        return joined, triton_joined_gated_gelu(joined, True)

    def fused(self, tile: Any) -> Tensors:
        """Return both by the one kernel, with a tile."""
        from fat5.ops.feed_forward.launch import run_forward

        return cast(Tensors, run_forward(self.x, self.weight, True, True, tile))

    @functools.cached_property
    def _limits(self) -> tuple[Tensors, list[float]]:
        """What float64 makes of the same inputs, and how far from it an answer may be."""
        joined = F.linear(self.x.double(), self.weight.double())
        exact = joined, gated_gelu_reference(*joined.chunk(2, -1))
        plain = [_error(got, want) for got, want in zip(self.two_kernels(), exact, strict=True)]
        return exact, [min(FORWARD_FACTOR * error, _LARGEST_LIMIT) for error in plain]

    def check(self, run: Callable[[], Tensors]) -> float:
        """Return the share of the limit that the worst error takes; raise GateError beyond."""
        exact, limits = self._limits
        with poisoned_memory(self.device, python_too=True):
            answer = run()
        worst = 0.0
        for place, (got, want, limit) in enumerate(zip(answer, exact, limits, strict=True)):
            error = _error(got, want)
            if not error <= limit:
                raise GateError(f"tensor {place} is off by {error:.2e} of its norm, more than the {limit:.2e} allowed")
            worst = max(worst, error / limit)
        return worst

    def subject(self, tile: Any, *, today: bool = False) -> Subject:
        """Return the fused kernel with a tile, or the yardstick for None."""
        run = self.two_kernels if tile is None else functools.partial(self.fused, tile)
        phase = Phase("forward", lambda: run, flops=4 * self.tokens * self.d_model * self.d_ff)
        return Subject(
            YARDSTICK if tile is None else str(tile),
            {"tokens": self.tokens, "d_model": self.d_model, "d_ff": self.d_ff},
            lambda: Prepared(lambda: self.check(run), (phase,), figures=lambda: {"today": today}),
            _unavailable(self.device),
            YARDSTICK,
        )


@torch.no_grad()
def measure(
    session: Session,
    tokens: Sequence[int],
    sizes: Sequence[tuple[int, int]],
    *,
    every_tile: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> Rows:
    """Measure the present tile, or every one, at every size."""
    tiles = _tiles(every_tile) if _unavailable(session.device) is None else []
    if session.device.type == "cuda" and len(tiles) > 1:
        _compile_all(tiles, sizes[0])
    rows: Rows = []
    for count, (d_model, d_ff) in itertools.product(tokens, sizes):
        stage = Stage(count, d_model, d_ff, session.device, dtype)
        rows += session.measure(stage.subject(None))
        for place, tile in enumerate(tiles):
            rows += session.measure(stage.subject(tile, today=place == 0))
    return rows


def _tiles(every_tile: bool) -> list[Any]:
    from fat5.ops.feed_forward.tiles import TILE, candidates

    return [*dict.fromkeys([TILE, *candidates()])] if every_tile else [TILE]


def _unavailable(device: torch.device) -> str | None:
    reason = own_unavailable()
    if reason is None and device.type == "cuda" and not card_can_fuse():
        return "the fused kernel runs on Hopper cards"
    return reason


def _compile_all(tiles: Sequence[Any], size: tuple[int, int]) -> None:
    """Compile in processes of their own; the binaries stay in Triton's cache on the disk."""
    workers = min(len(tiles), len(os.sched_getaffinity(0)))
    print(f"compiling {len(tiles)} kernels in {workers} processes", file=sys.stderr, flush=True)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(functools.partial(_compile, size=size), tiles))


def _compile(tile: Any, size: tuple[int, int]) -> None:
    try:
        Stage(256, *size, torch.device("cuda")).fused(tile)
        torch.cuda.synchronize()
    except Exception as error:  # the row of this tile will say so again
        print(f"{tile}: {error}", file=sys.stderr, flush=True)


def _error(x: Tensor, truth: Tensor) -> float:
    return float((x.double() - truth).norm() / truth.norm())
