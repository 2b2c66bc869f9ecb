"""A step of AdamWScale: all tensors of a model, beside PyTorch's AdamW and Adafactor."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.session import Session
    from benchmarks.tables import Claim

SUMMARY = "a step of AdamWScale with clipping, fused and not, beside PyTorch's AdamW and Adafactor"

TARGETS_MS = {("130M, bf16", "clip + step"): 0.85}
"""Kernel times to reach on an H200, by workload and phase."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the case's options."""
    lists, types = ("130M", "french-small"), ("bf16", "fp32")
    several: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    parser.add_argument("--tensors", choices=lists, default=list(lists), help="lists of tensors", **several)
    parser.add_argument("--dtype", choices=types, help="bf16 or fp32, by default both; bf16 with --quick", **several)
    names = "some of fat5-fused, fat5-foreach, adamw-fused, adamw-foreach, adafactor; by default all but the last"
    parser.add_argument("--implementations", help=names, **several)
    parser.add_argument("--sweep", action="store_true", help="fat5-fused alone, with blocks of many sizes")


def run(arguments: Namespace, session: Session) -> None:
    """Measure, print the table, what was missed last."""
    from benchmarks.bandwidth import copy_speed, show
    from benchmarks.optimizer.stage import choose, place, subject, sweep
    from benchmarks.optimizer.workload import Workload
    from benchmarks.tables import problems

    chosen = sweep() if arguments.sweep else choose(arguments.implementations)
    dtypes = arguments.dtype or (("bf16",) if session.quick or arguments.sweep else ("bf16", "fp32"))
    speed = copy_speed(session)
    rows = [
        row
        for tensors in arguments.tensors
        for dtype in dtypes
        for name, implementation in chosen.items()
        for row in session.measure(subject(Workload(tensors, dtype), name, implementation, session.device, speed))
    ]
    print(f"\noptimizer\n{show(rows, place)}")
    print(f"\nhost and wall, ms\n{_host_times(rows)}")
    print("\n" + "\n".join(map(str, claims(rows))))
    print(problems(rows, place))


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Return the times to reach for which the rows of one run have a measurement."""
    from benchmarks.bandwidth import time_claims
    from benchmarks.optimizer.stage import place

    return time_claims([row for row in rows if "tensors" in row], TARGETS_MS, "fat5-fused", place)


def _host_times(rows: list[dict[str, Any]]) -> str:
    """Return a table of what eager steps cost the host, and of whole steps by the wall clock."""
    from benchmarks.optimizer.stage import WALL, place
    from benchmarks.tables import format_table, number

    times: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        if "p50_ms" in row:
            times.setdefault((place(row), row["implementation"]), {})[row["phase"]] = row
    lines = [
        [
            f"{where} {name}",
            number(phases.get("clip + step", {}).get("host_ms")),
            number(phases.get(WALL, {}).get("p50_ms")),
        ]
        for (where, name), phases in times.items()
    ]
    return format_table(["clip + step", "host", "wall"], lines)
