"""The tables of the terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.attention.catalogue import YARDSTICK
from benchmarks.session import OK
from benchmarks.tables import format_table, number
from fat5.ops.attention.hopper.configuration import ForwardShape

Rows = list[dict[str, Any]]


def fastest(rows: Iterable[Mapping[str, Any]]) -> ForwardShape | None:
    """Return the shape with the least time, or None where none was measured."""
    timed = [row for row in rows if row["status"] == OK and row["implementation"] != YARDSTICK]
    if not timed:
        return None
    row = min(timed, key=lambda row: row["p50_ms"])
    return ForwardShape(*(row[field.name] for field in dataclasses.fields(ForwardShape)))


def place(row: Mapping[str, Any]) -> str:
    """Return the workload of a row in a few words."""
    return f"D{row['head_dim']} L{row['length']} {row['mask']} {row['layout']}"


def show_all(rows: Rows) -> str:
    """Return the ratios to cuDNN, a line a shape and a column a workload; in ms where cuDNN was not measured."""
    blocks: dict[tuple[Any, ...], dict[str, dict[str, str]]] = {}
    for row in rows:
        if row["status"] == OK and row["implementation"] != YARDSTICK:
            block = blocks.setdefault((row["head_dim"], row["mask"], row["layout"]), {})
            block.setdefault(row["implementation"], {})[f"L{row['length']}"] = _figure(row)
    tables = []
    for (head_dim, mask, layout), block in blocks.items():
        columns = list(dict.fromkeys(column for cells in block.values() for column in cells))
        lines = [[name, *(cells.get(column, "") for column in columns)] for name, cells in block.items()]
        tables.append(format_table([f"D{head_dim} {mask} {layout}, x {YARDSTICK}", *columns], lines))
    return "\n\n".join(tables)


def show_best(rows: Rows) -> str:
    """Return a line a workload: cuDNN, today's shape and the fastest."""
    groups: dict[str, Rows] = {}
    for row in rows:
        if row["status"] == OK:
            groups.setdefault(place(row), []).append(row)
    lines = []
    for name, group in groups.items():
        own = [row for row in group if row["implementation"] != YARDSTICK]
        if not own:
            continue
        unit = next((row for row in group if row["implementation"] == YARDSTICK), None)
        today = next((row for row in own if row["today"]), None)
        best = min(own, key=lambda row: row["p50_ms"])
        cells = [cell for row in (today, best) for cell in _cells(row)]
        lines.append([name, number(unit and unit["p50_ms"], ".4f"), *cells, best["implementation"]])
    ratio = f"x {YARDSTICK}"
    return format_table(["fastest", f"{YARDSTICK} ms", "today ms", ratio, "best ms", ratio, "shape"], lines)


def _cells(row: Mapping[str, Any] | None) -> tuple[str, str]:
    return ("-", "-") if row is None else (number(row["p50_ms"], ".4f"), number(row["ratio"]))


def _figure(row: Mapping[str, Any]) -> str:
    return f"{row['p50_ms']:.4f} ms" if row["ratio"] is None else number(row["ratio"])
