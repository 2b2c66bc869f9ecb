"""Lines of the tables as they come, and the figures to reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.scaling.plan import SAME, TIMES
from benchmarks.session import OK
from benchmarks.tables import Claim, number

SHARE_OF_ONE = 0.95
"""Tokens per second of each GPU of several, each with a whole batch, over those of one GPU alone."""

_COLUMNS = (
    ("k tokens/s", "tokens_per_s", ".1f", 1e-3),
    ("of one", "share_of_one", ".1%", 1.0),
    ("reserved GiB", "peak_reserved_gib", ".1f", 1.0),
    ("NCCL alone", "share_communication_alone", ".1%", 1.0),
    ("NCCL", "share_communication", ".1%", 1.0),
    ("loss", "loss", ".4f", 1.0),
    ("distance", "loss_distance", ".1e", 1.0),
)
_WIDTH = 12
HEADER = f"{'run':<44}" + "".join(f"{title:>{_WIDTH}}" for title, *_ in _COLUMNS)

Row = Mapping[str, Any]


def describe(row: Row) -> str:
    """Return the run of a row in a few words, without who trains."""
    if row["table"] == "resumed":
        return f"{row['model']} saved by {row['several']}, resumed by {row['processes']}:"
    size = {SAME: "same batch", TIMES: "times the batch" if row["processes"] != 1 else "its batch"}[row["batch"]]
    return f"{row['model']} x{row['processes']}, {size}:"


def line(row: Row) -> str:
    """Return one row as a line of the table."""
    start = f"{describe(row)} {row['implementation']}"
    if row["status"] != OK:
        return f"{start:<44} {row['status']}: {row['error'][:200]}"
    cells = []
    for _, name, form, factor in _COLUMNS:
        value = row.get(name)
        cells.append(f"{number(None if value is None else value * factor, form):>{_WIDTH}}")
    return f"{start:<44}{''.join(cells)}"


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the figures to reach for which these rows have a measurement: the speed of several GPUs."""
    return [
        Claim(
            f"{describe(row)} {row['implementation']}, tokens/s a GPU over one's",
            row["share_of_one"],
            SHARE_OF_ONE,
            unit="",
        )
        for row in rows
        if row["status"] == OK
        and row["table"] == "runs"
        and row["batch"] == TIMES
        and row["processes"] > 1
        and row["gpu"] != "none"
    ]
