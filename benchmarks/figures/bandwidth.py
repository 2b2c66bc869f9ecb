"""The figure of a case bound by memory: the share of the copy's speed that each implementation reaches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.figure import Figure

from benchmarks.bandwidth import share
from benchmarks.figures.style import caption, latest, legend_below, look, new_figure, tidy

_HEIGHT = 0.8  # of the bars of one group, of the distance between groups


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
    if not fine:
        return None
    shown = latest(fine)
    groups = list(dict.fromkeys(f"{place(row)}\n{row['phase']}" for row in shown))
    names = list(dict.fromkeys(row["implementation"] for row in shown))
    figure, grid = new_figure(7.0, 1.4 + 0.19 * len(groups) * (len(names) + 1))
    axes = grid[0, 0]
    thickness = _HEIGHT / len(names)
    for side, name in enumerate(names):
        own = [row for row in shown if row["implementation"] == name]
        heights = [
            groups.index(f"{place(row)}\n{row['phase']}") + thickness * (side - (len(names) - 1) / 2) for row in own
        ]
        style = look(name)
        bars = axes.barh(heights, [share(row) for row in own], thickness, color=style["color"], label=style["label"])
        axes.bar_label(bars, [f"{float(row['p50_ms']):.3f} ms" for row in own], padding=3, fontsize=6)
    axes.axvline(1.0, color="#000000", linewidth=1.0, linestyle="--", label="speed of a copy")
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("share of the speed of a copy within the card's memory", fontsize=8)
    axes.set_title(f"{title} ({caption(shown)})", fontsize=9)
    tidy(axes)
    legend_below(figure, [axes], columns=3)
    return figure
