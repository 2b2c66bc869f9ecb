"""The table of the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.session import OK
from benchmarks.tables import format_table, number

Row = Mapping[str, Any]


def place(row: Row) -> str:
    """Return the size."""
    return f"{row['tokens']}x{row['d_model']}x{row['d_ff']}"


def table(rows: Iterable[Row]) -> str:
    """Return for each size both kernels of before, the present tile, and the three fastest."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["status"] == OK and "p50_ms" in row:
            groups.setdefault(place(row), []).append(row)
    lines = []
    for name, group in groups.items():
        unit = next((row for row in group if row["implementation"] == row["yardstick"]), None)
        own = sorted((row for row in group if row is not unit), key=lambda row: row["p50_ms"])
        today = next((row for row in own if row["today"]), None)
        before = number(unit and unit["p50_ms"], ".4f")
        for rank, row in enumerate([r for r in (today, *own[:3]) if r is not None]):
            which = "present" if rank == 0 and row is today else f"no. {rank}"
            lines.append(
                [name if rank == 0 else "", before if rank == 0 else "", which, number(row["p50_ms"], ".4f"),
                 number(row["ratio"]), row["implementation"]]
            )  # fmt: skip
    return format_table(["tokens x widths", "two kernels ms", "", "fused ms", "x two kernels", "tile"], lines)
