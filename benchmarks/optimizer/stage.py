"""What the session measures: an optimizer over a workload's tensors."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.optimizer import gate
from benchmarks.optimizer.implementations import (
    IMPLEMENTATIONS,
    SWEEP,
    Implementation,
    clip,
    launched_as,
    unavailable_here,
)
from benchmarks.optimizer.workload import DTYPES, Workload
from benchmarks.registry import UsageError
from benchmarks.subject import Phase, Prepared, Subject

YARDSTICK = "adamw-fused"
WALL = "clip + step, wall"


def choose(names: Sequence[str] | None) -> dict[str, Implementation]:
    """Return the implementations to measure, the yardstick first.

    Raises:
        UsageError: A name is unknown.
    """
    for name in names or ():
        if name not in IMPLEMENTATIONS:
            near = difflib.get_close_matches(name, IMPLEMENTATIONS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"no implementation {name!r}; expected some of {', '.join(IMPLEMENTATIONS)}{hint}")
    chosen = {
        name: one for name, one in IMPLEMENTATIONS.items() if (not one.by_name if names is None else name in names)
    }
    return dict(sorted(chosen.items(), key=lambda item: item[0] != YARDSTICK))


def sweep() -> dict[str, Implementation]:
    """Return the fused form with blocks of several sizes."""
    return {f"fat5-fused {x.block}x{x.blocks_a_chunk}, {x.warps} warps": launched_as(x) for x in SWEEP}


def place(row: Mapping[str, Any]) -> str:
    """Return the workload of a row in a few words."""
    return f"{row['tensors']}, {row['dtype']}"


def subject(
    workload: Workload, name: str, implementation: Implementation, device: torch.device, copy_gb_per_s: float | None
) -> Subject:
    """Return what the session measures: the step alone, with clipping, and with clipping by the wall clock."""

    def prepare() -> Prepared:
        optimizer = implementation.make(workload.groups(device))

        def step() -> None:
            optimizer.step()

        def clip_and_step() -> None:
            clip(optimizer)
            optimizer.step()

        def wait() -> None:
            clip_and_step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        sizes = (workload.numel, DTYPES[workload.dtype].itemsize)
        phases = (
            Phase("step", lambda: step, bytes=implementation.bytes_of(*sizes, clip=False)),
            Phase("clip + step", lambda: clip_and_step, bytes=implementation.bytes_of(*sizes, clip=True)),
            Phase(WALL, lambda: wait, on_host=True),
        )
        return Prepared(
            check=lambda: gate.check(workload, implementation, device),
            phases=phases,
            peak=clip_and_step,
            figures=lambda: {"copy_gb_per_s": copy_gb_per_s},
        )

    reason = unavailable_here(implementation)
    return Subject(name, workload.columns(), prepare, reason, yardstick=YARDSTICK)
