"""The rows of the CSV files as runs: which table, when, on what, with typed cells."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import read_rows

MACHINE = ("gpu", "cpu_cores", "torch", "triton", "cuda", "cudnn", "transformers", "python", "fat5", "commit")
ORIGIN = ("case", "date", "table", *MACHINE, "command")
"""Columns that are the same for all rows of one run's table."""

_INTEGER, _NUMBER = re.compile(r"-?\d+"), re.compile(r"-?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|nan|-?inf", re.IGNORECASE)
_TEXT = frozenset((*ORIGIN, "error", "implementation"))


class Cells(dict[str, Any]):
    """The filled cells of a row; every other column is None, as in the rows of a run that has just been made."""

    def __missing__(self, name: str) -> None:
        return None


def typed(row: Mapping[str, str]) -> Cells:
    """Return a row of a CSV file with numbers and truth values in the place of their texts."""
    return Cells({name: _value(name, text) for name, text in row.items() if text != ""})


@dataclass(frozen=True)
class Run:
    """The rows of one table that one command made.

    Attributes:
        case: The case.
        table: The part of it; empty where a case has no parts.
        rows: In their order.
    """

    case: str
    table: str
    rows: list[Cells]

    @property
    def date(self) -> str:
        """Start of the run, UTC."""
        return str(self.rows[0]["date"])

    @property
    def on_gpu(self) -> bool:
        """Whether it was measured on a GPU."""
        return self.rows[0]["gpu"] not in (None, "none")

    def command(self) -> str:
        """Return what measures the table again: as it was run if the rows say so, else with the case's defaults."""
        recorded = self.rows[0]["command"]
        return str(recorded) if recorded else usual_command(self.case, self.table)


def usual_command(case: str, table: str = "") -> str:
    """Return the command for a case, or a table of it, with default settings."""
    option = {
        ("attention", table): f"--shapes {table}",
        ("pretrain", table): f"--tables {table}",
        ("cross_entropy", "tiles"): "--tiles",
        ("linear_cross_entropy", "chunks"): "--chunk-mib N ...",
        ("curves", table): "--train DIR --validation DIR --tokenizer DIR",
        ("tasks", table): "--data DIR",
    }
    # Both need a corpus, whichever table is meant; the other options name one.
    named = option.get((case, table), "") if table or case in ("curves", "tasks") else ""
    return f"python -m benchmarks {case} {named}".rstrip()


def read_runs(path: Path) -> list[Run]:
    """Return the runs of a CSV file by table, in the order of their first rows, the newest of each table first."""
    tables: dict[str, dict[str, list[Cells]]] = {}
    for row in map(typed, read_rows(path)):
        tables.setdefault(str(row["table"] or ""), {}).setdefault(str(row["date"]), []).append(row)
    return [
        Run(path.stem, table, dates[date]) for table, dates in tables.items() for date in sorted(dates, reverse=True)
    ]


def newest(runs: Sequence[Run]) -> list[Run]:
    """Return the newest run of each table."""
    first: dict[str, Run] = {}
    for run in runs:
        first.setdefault(run.table, run)
    return list(first.values())


def by_command(runs: Iterable[Run]) -> list[Run]:
    """Return the rows of each command as one run without a table, the newest command first."""
    dates: dict[str, Run] = {}
    for run in runs:
        dates.setdefault(run.date, Run(run.case, "", [])).rows.extend(run.rows)
    return [dates[date] for date in sorted(dates, reverse=True)]


def _value(name: str, text: str) -> Any:
    if name in _TEXT:
        return text
    if text in ("True", "False"):
        return text == "True"
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text
