"""Results of finetunings and evaluations: mean and spread over seeds, JSON files, tables for people."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fat5.errors import DataError
from fat5.files import atomic_file

RESULT_NAME, TABLE_NAME = "result.json", "result.md"

Scores = dict[str, float]


def summarize(runs: Sequence[Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """Return for each score its mean, its spread (sample standard deviation, None for one run) and all values.

    A score that some of the runs lack, such as the F1 of a class, is left out of none: its mean is over those that have
    it.
    """
    summary = {}
    for name in dict.fromkeys(name for run in runs for name in run):
        values = [run[name] for run in runs if name in run]
        spread = statistics.stdev(values) if len(values) > 1 else None
        summary[name] = {"mean": statistics.fmean(values), "spread": spread, "values": values}
    return summary


def table(columns: Mapping[str, Mapping[str, Any]], leading: str) -> str:
    """Return a Markdown table, a line a score, the leading one first and those of single classes last.

    Args:
        columns: Name of a model or baseline to its scores: numbers, or entries of `summarize`.
        leading: Name of the score that decides.
    """
    names = dict.fromkeys(name for scores in columns.values() for name in scores)
    order = sorted(names, key=lambda name: (name != leading, "/" in name))
    lines = [["score (%)", *columns], ["---", *("---:" for _ in columns)]]
    for name in order:
        label = f"**{name}**" if name == leading else name
        lines.append([label, *(_cell(scores.get(name)) for scores in columns.values())])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        spread = value["spread"]
        return f"{value['mean']:.2f}" + ("" if spread is None else f" ± {spread:.2f}")
    return f"{value:.2f}"


def write_result(folder: Path, result: Mapping[str, Any], text: str | None = None) -> None:
    """Write `result.json`, and `result.md` where there is a text, each whole or not at all."""
    with atomic_file(folder / RESULT_NAME) as path:
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if text is not None:
        with atomic_file(folder / TABLE_NAME) as path:
            path.write_text(text + "\n", encoding="utf-8")


def read_result(folder: Path) -> dict[str, Any]:
    """Return what `write_result` wrote.

    Raises:
        DataError: The file is damaged.
    """
    path = folder / RESULT_NAME
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is no result of a finetuning: {error}") from error
