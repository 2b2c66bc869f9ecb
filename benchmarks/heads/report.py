"""The table as the terminal shows it, and what it says of the figures to reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.heads.models import YARDSTICK
from benchmarks.session import OK
from benchmarks.tables import Claim, format_table, number

SPEED_UP = 1.9
"""Throughput over that of Transformers' classifier, in inference and in training, without padding."""

Row = Mapping[str, Any]


def describe(row: Row) -> str:
    """Return the workload of a row in a few words."""
    padding = ", half padding" if row["padding"] else ""
    return f"{row['size']} {row['dtype']} B{row['batch']} L{row['length']}{padding}"


def show(rows: Sequence[Row]) -> str:
    """Return a line an implementation: parameters, texts a second in both phases with their ratio, peak memory."""
    lines = []
    for (_, name), phases in _by_implementation(rows).items():
        first = next(iter(phases.values()))
        cells = [f"{describe(first):<32} {name}", number(first["parameters"] / 1e6, ".1f")]
        for phase in ("inference", "training"):
            row = phases[phase]
            cells += [number(row["p50_ms"]), number(row["texts_per_s"], ".0f"), number(speed_up(row), ".2f")]
        lines.append([*cells, number(first["peak_mib"], ".0f"), number(first["gate"], ".2f")])
    phase = ["ms", "texts/s", f"x {YARDSTICK}"]
    header = [f"{'workload':<32} implementation", "M par.", *phase, *phase, "peak MiB", "gate"]
    return format_table(["", "", "inference", "", "", "training", "", "", "", ""], [header, *lines])


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Return every figure to reach for which these rows have a measurement."""
    found = []
    for (_, name), phases in _by_implementation(rows).items():
        for phase, row in phases.items():
            gain = speed_up(row)
            if name == "fat5" and not row["padding"] and gain is not None:
                found.append(Claim(f"{name} {phase}, {describe(row)}, throughput over {YARDSTICK}", gain, SPEED_UP))
    return found


def speed_up(row: Row) -> float | None:
    """Return how many times faster than the yardstick a row is."""
    return None if row.get("ratio") is None else 1 / row["ratio"]


def _by_implementation(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, Row]]:
    groups: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if row["status"] == OK:
            groups.setdefault((describe(row), row["implementation"]), {})[row["phase"]] = row
    return groups
