"""The rows of all runs, one CSV file a case."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fat5.files import atomic_file

Row = Mapping[str, Any]


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file, oldest first, as text; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def append_rows(path: Path, rows: Sequence[Row]) -> int:
    """Append the rows that the file does not hold yet, and return their number.

    A row may have columns that the file lacks, and lack some: the file then holds all columns of both, empty where a
    row has none. The file is replaced as a whole, so that a run that is killed leaves it as it was.
    """
    old = read_rows(path)
    known = {_content(row) for row in old}
    new = [text for row in rows if _content(text := {name: _text(value) for name, value in row.items()}) not in known]
    columns = list(dict.fromkeys(name for row in (*old, *new) for name in row))
    if new:
        with atomic_file(path) as staging, staging.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows([*old, *new])
    return len(new)


def write_json(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows as a JSON list, one row a line."""
    lines = ",\n".join(json.dumps(dict(row)) for row in rows)
    with atomic_file(path) as staging:
        staging.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def read_json(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file written by `write_json`.

    Raises:
        ValueError: The file holds something else.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON file: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) and row.get("case") for row in rows):
        raise ValueError(f"{path} is no list of benchmark rows; expected a file written with --json")
    return rows


def _content(row: Row) -> frozenset[tuple[str, str]]:
    """Return what tells a row from another: its filled cells, whatever their order."""
    return frozenset((name, value) for name, value in row.items() if value != "")


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
