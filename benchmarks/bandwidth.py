"""What the cases bound by memory share: the speed of a copy on this card, and tables that show each time beside it.

The limit of a step is the time in which a copy moves the bytes that the step must move: its inputs once and its outputs
once. The copy is measured in the same run, so that shares of the limit hold on any card. A case gives each `Phase` its
`bytes`, and each `Prepared` the column `copy_gb_per_s` among its `figures`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.session import FAILED, OK, Session
from benchmarks.subject import GateError, Phase, Prepared, Subject
from benchmarks.tables import Claim, format_table, number

COPY = "copy"
"""Table and implementation of the copy's own row."""

_GPU_BYTES, _HOST_BYTES = 2**30, 2**26

Row = Mapping[str, Any]


def copy_speed(session: Session) -> float | None:
    """Measure and record a copy within the device's memory, and return bytes read and written in GB/s.

    None if it failed; the rows then have no share of the limit.
    """
    size = _GPU_BYTES if session.device.type == "cuda" else _HOST_BYTES

    def prepare() -> Prepared:
        source = torch.arange(size // 4, dtype=torch.int32, device=session.device)
        target = torch.zeros_like(source)

        def check() -> float:
            if not torch.equal(target.copy_(source), source):
                raise GateError("the copy differs from its source")
            return 0.0

        return Prepared(check, (Phase(COPY, lambda: lambda: target.copy_(source), bytes=2 * size),))

    (row,) = session.measure(Subject(COPY, {"table": COPY}, prepare))
    return row.get("gb_per_s")


def moved_bytes(*tensors: Tensor) -> int:
    """Return the bytes of these tensors, each read or written once."""
    return sum(x.numel() * x.element_size() for x in tensors)


def share(row: Row) -> float | None:
    """Return the part of the copy's speed that a row's step reaches, 1 at the limit."""
    reached, limit = row.get("gb_per_s"), row.get("copy_gb_per_s")
    return float(reached) / float(limit) if reached and limit else None


def show(rows: Iterable[Row], place: Callable[[Row], str]) -> str:
    """Return a table: for each workload and phase a line an implementation, with its time and share of the limit.

    Args:
        rows: Of one run.
        place: Returns the workload of a row in a few words.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    failed: list[list[str]] = []
    for row in rows:
        if row["status"] == OK and row.get("phase") not in (None, COPY):
            groups.setdefault((place(row), row["phase"]), []).append(row)
        elif row["status"] == FAILED:
            failed.append([f"{place(row)} {row['implementation']}", FAILED, *[""] * 6])
    width = max((len(f"{where} {phase}") for where, phase in groups), default=0)
    lines = []
    for (where, phase), members in groups.items():
        title = f"{where} {phase}"
        for row in members:
            lines.append([f"{title:<{width}} {row['implementation']}", *_cells(row)])
            title = ""
    units = [row["yardstick"] for members in groups.values() for row in members if row.get("yardstick")]
    ratio = f"x {units[0]}" if units else "ratio"
    header = [f"{'':<{width}} implementation", "ms", "limit", "share", "GB/s", ratio, "MiB", "gate"]
    return format_table(header, [*lines, *failed])


def time_claims(
    rows: Iterable[Row], targets: Mapping[tuple[str, str], float], implementation: str, place: Callable[[Row], str]
) -> list[Claim]:
    """Return the times to reach for which these rows have a measurement.

    Args:
        rows: Of one run.
        targets: Milliseconds by workload, as `place` words it, and phase.
        implementation: Whose times.
        place: Returns the workload of a row in a few words.
    """
    own = [row for row in rows if row["status"] == OK and row["implementation"] == implementation]
    return [
        Claim(f"{implementation} {row['phase']}, {place(row)}", row["p50_ms"], target, at_most=True, unit=" ms")
        for row in own
        if (target := targets.get((place(row), row.get("phase", "")))) is not None
    ]


def _cells(row: Row) -> Sequence[str]:
    part = share(row)
    limit = None if part is None else part * row["p50_ms"]
    speed = number(row.get("gb_per_s"), ".0f")
    ends = [number(row.get("ratio"), ".2f"), number(row.get("peak_mib"), ".0f"), number(row.get("gate"), ".2f")]
    return [number(row["p50_ms"], ".4f"), number(limit, ".4f"), number(part, ".0%"), speed, *ends]
