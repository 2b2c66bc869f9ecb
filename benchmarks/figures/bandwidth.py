"""The figure of a case bound by memory: the share of the copy's speed that each implementation reaches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.figure import Figure

from benchmarks.bandwidth import share
from benchmarks.figures.bars import draw_bars
from benchmarks.figures.style import latest


def draw_shares(
    rows: Sequence[Mapping[str, str]], title: str, place: Callable[[Mapping[str, str]], str]
) -> Figure | None:
    """Draw a group of bars for each workload and phase of the latest run, with the times in milliseconds beside them.

    Args:
        rows: All rows of the case.
        title: What is measured.
        place: Returns the workload of a row in a few words.
    """
    fine = [row for row in rows if row["status"] == "ok" and row.get("copy_gb_per_s") and row.get("gb_per_s")]
    return draw_bars(
        latest(fine),
        title=title,
        axis="share of the speed of a copy within the card's memory",
        place=lambda row: f"{place(row)}\n{row['phase']}",
        value=share,
        label=lambda row: f"{float(row['p50_ms']):.3f} ms",
        limit=(1.0, "speed of a copy"),
    )
