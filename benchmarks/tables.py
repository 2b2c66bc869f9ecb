"""Compact tables for the terminal, and the claims that a case is measured against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.session import FAILED, SKIPPED


def format_table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return columns two spaces apart: the first aligned left, the others right."""
    table = [header, *lines]
    widths = [max(len(line[column]) for line in table) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    )


def number(value: float | None, form: str = ".3f") -> str:
    """Return a number as text, "-" for none."""
    return "-" if value is None else f"{value:{form}}"


def problems(rows: Iterable[Mapping[str, Any]], place: Callable[[Mapping[str, Any]], str]) -> str:
    """Return a line for each row that failed, with its place, and one for each reason why some were skipped."""
    failed, skipped = [], Counter()
    for row in rows:
        if row["status"] == FAILED:
            failed.append(f"{FAILED} {place(row)} {row['implementation']}: {row['error'][:200]}")
        elif row["status"] == SKIPPED:
            skipped[row["implementation"], row["error"][:160]] += 1
    reasons = [f"{SKIPPED} {name} ({times}x): {error}" for (name, error), times in sorted(skipped.items())]
    return "\n".join([*failed, *reasons])


@dataclass(frozen=True)
class Claim:
    """A figure beside the one to reach.

    Attributes:
        text: What is measured.
        measured: The figure, None if it could not be had.
        target: The figure to reach.
        at_most: True where smaller is better.
        unit: After both figures.
    """

    text: str
    measured: float | None
    target: float
    at_most: bool = False
    unit: str = "x"

    @property
    def met(self) -> bool:
        """Whether the target is reached."""
        if self.measured is None:
            return False
        return self.measured <= self.target if self.at_most else self.measured >= self.target

    def __str__(self) -> str:
        if self.measured is None:
            return f"not measured  {self.text}"
        sign = "<=" if self.at_most else ">="
        verdict = "met   " if self.met else "MISSED"
        return f"{verdict}  {self.text}: {self.measured:.4g}{self.unit} ({sign} {self.target:g}{self.unit})"
