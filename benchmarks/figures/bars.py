"""Groups of bars: a group a workload, a bar an implementation, its figures beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.figure import Figure

from benchmarks.figures.style import WITHOUT_BIAS, caption, legend_below, look, new_figure, tidy

Row = Mapping[str, str]

_HEIGHT = 0.8  # of the bars of one group, of the distance between groups


def draw_bars(
    rows: Sequence[Row],
    *,
    title: str,
    axis: str,
    place: Callable[[Row], str],
    value: Callable[[Row], float | None],
    label: Callable[[Row], str],
    looks: Mapping[str, tuple[str, str]] | None = None,
    limit: tuple[float, str] | None = None,
) -> Figure | None:
    """Draw a bar for each row that has a value, or return None where none has.

    Args:
        rows: Of one run.
        title: What is measured; the machine and the date are added.
        axis: What the lengths of the bars are.
        place: Returns the workload of a row in a few words: its group.
        value: Returns the length of a row's bar, None for no bar.
        label: Returns what stands behind the bar.
        looks: Colour and label of implementations, where the usual ones do not fit.
        limit: Where a line stands that no bar passes, and what it is.
    """
    shown = [(row, length) for row in rows if (length := value(row)) is not None]
    if not shown:
        return None
    groups = list(dict.fromkeys(place(row) for row, _ in shown))
    names = list(dict.fromkeys(row["implementation"] for row, _ in shown))
    figure, grid = new_figure(7.0, 1.4 + 0.19 * sum(len(_members(shown, place, group)) + 1 for group in groups))
    axes = grid[0, 0]
    top, ticks, labelled = 0.0, [], set()
    for group in groups:
        members = sorted(_members(shown, place, group), key=lambda member: names.index(member[0]["implementation"]))
        heights = [top + side for side in range(len(members))]
        for height, (row, length) in zip(heights, members, strict=True):
            name = row["implementation"]
            color, text = (looks or {}).get(name) or (look(name)["color"], WITHOUT_BIAS.get(name, look(name)["label"]))
            bars = axes.barh(height, length, _HEIGHT, color=color, label="_" if text in labelled else text)
            axes.bar_label(bars, [label(row)], padding=3, fontsize=7)
            labelled.add(text)
        ticks.append((heights[0] + heights[-1]) / 2)
        top += len(members) + 1
    if limit is not None:
        axes.axvline(limit[0], color="#000000", linewidth=1.0, linestyle="--", label=limit[1])
    axes.set_yticks(ticks, groups)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_xlim(left=0)
    axes.set_xlabel(axis, fontsize=8)
    axes.set_title(f"{title} ({caption([row for row, _ in shown])})", fontsize=9)
    tidy(axes)
    legend_below(figure, [axes], columns=3)
    return figure


def _members(shown: Sequence[tuple[Row, float]], place: Callable[[Row], str], group: str) -> list[tuple[Row, float]]:
    return [member for member in shown if place(member[0]) == group]


def cell(row: Row, name: str) -> float | None:
    """Return a figure of a row, None where it has none."""
    text = row.get(name)
    return float(text) if text else None
