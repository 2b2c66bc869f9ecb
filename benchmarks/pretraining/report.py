"""Lines of the table as they come, and the figures to reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.tables import Claim, number

_COLUMNS = (
    ("ms", "p50_ms", ".1f", 1.0),
    ("k tokens/s", "tokens_per_s", ".0f", 1e-3),
    ("TFLOP/s", "tflops", ".0f", 1.0),
    ("of 990", "utilisation", ".1%", 1.0),
    ("peak GiB", "peak_gib", ".2f", 1.0),
    ("reserved", "peak_reserved_gib", ".2f", 1.0),
    ("GEMM", "share_gemm", ".0%", 1.0),
    ("attention", "share_attention", ".0%", 1.0),
    ("memory", "share_memory_bound", ".0%", 1.0),
    ("idle", "share_idle", ".0%", 1.0),
    ("1st step s", "first_step_s", ".0f", 1.0),
)
_WIDTH = 11
HEADER = f"{'table':<10} {'implementation':<22}" + "".join(f"{title:>{_WIDTH}}" for title, *_ in _COLUMNS)


def line(row: Mapping[str, Any]) -> str:
    """Return one row as a line of the table."""
    start = f"{row['table']:<10} {row['implementation']:<22}"
    if row["status"] != "ok":
        return f"{start} {row['status']}: {row['error'][:120]}"
    cells = []
    for _, name, form, factor in _COLUMNS:
        value = row.get(name)
        cells.append(f"{number(None if value is None else value * factor, form):>{_WIDTH}}")
    return start + "".join(cells)


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Return the figures to reach beside those measured, of the tables that were run."""
    found = {(row["table"], row["implementation"]): row for row in rows if "p50_ms" in row}
    tables = {row["table"] for row in rows}

    def best(table: str, name: str) -> float | None:
        """Return a figure of FAT5's fastest implementation, so that all that is claimed of a table is one step's."""
        ours = [row for (place, who), row in found.items() if place == table and who.startswith("fat5-")]
        return None if not ours else max(ours, key=lambda row: row["tokens_per_s"]).get(name)

    def over_transformers(table: str) -> float | None:
        peer, own = found.get((table, "transformers-compiled")), best(table, "tokens_per_s")
        return None if peer is None or own is None else own / peer["tokens_per_s"]

    result = []
    if "8x64" in tables:
        rate = best("8x64", "tokens_per_s")
        result += [
            Claim("8 x 64: thousand tokens/s", None if rate is None else rate / 1e3, 880, unit=""),
            Claim("8 x 64: over Transformers compiled", over_transformers("8x64"), 1.9),
            Claim("8 x 64: peak", best("8x64", "peak_gib"), 14, at_most=True, unit=" GiB"),
        ]
    if "4x128" in tables:
        result.append(Claim("4 x 128: over Transformers compiled", over_transformers("4x128"), 1.6))
    if {"documents", "8x64"} <= tables:
        real, full = best("documents", "tokens_per_s"), best("8x64", "tokens_per_s")
        ratio = None if real is None or full is None else real / full
        result.append(Claim("real documents: real tokens/s over those without padding", ratio, 0.95))
    if "base" in tables:
        result.append(Claim("base: of 990 TFLOP/s", best("base", "utilisation"), 0.4, unit=""))
    if "long" in tables:
        result.append(Claim("65,536 tokens train: thousand tokens/s", best("long", "tokens_per_s"), 0, unit=""))
    return result
