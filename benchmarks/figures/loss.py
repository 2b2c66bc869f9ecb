"""The figures of the losses: time beside its limit, and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from benchmarks.cases import cross_entropy, linear_cross_entropy
from benchmarks.figures.bandwidth import draw_shares
from benchmarks.figures.style import WITHOUT_BIAS, caption, latest, look, new_figure, tidy

Rows = Sequence[Mapping[str, str]]


def draw_logits(rows: Rows) -> Figure | None:
    """Draw the share of a copy's speed that each implementation reaches on given logits."""
    times = [row for row in rows if row["table"] == "times"]
    return draw_shares(times, "Cross-entropy with z-loss, forward and backward", cross_entropy.place)


def draw_hidden(rows: Rows) -> Figure | None:
    """Draw time and memory of the loss from hidden states, at the first workload of the latest run."""
    fine = latest([row for row in rows if row["table"] == "times" and row["status"] == "ok" and row["p50_ms"]])
    if not fine:
        return None
    place = linear_cross_entropy.place(fine[0])
    shown = [row for row in fine if linear_cross_entropy.place(row) == place]
    figure, grid = new_figure(8.0, 1.6 + 0.3 * len(shown), columns=2, sharey=True)
    panels = (
        ("forward and backward, ms", [float(row["p50_ms"]) for row in shown]),
        ("peak beyond inputs and returned gradients, MB", [linear_cross_entropy.beyond_mb(row) for row in shown]),
    )
    for axes, (label, values) in zip(grid[0], panels, strict=True):
        measured = [(side, value) for side, value in enumerate(values) if value is not None]
        colors = [look(shown[side]["implementation"])["color"] for side, _ in measured]
        bars = axes.barh([side for side, _ in measured], [value for _, value in measured], 0.7, color=colors)
        axes.bar_label(bars, [f"{value:.2f}" if value < 100 else f"{value:,.0f}" for _, value in measured], fontsize=7)
        axes.set_xlabel(label, fontsize=8)
        axes.margins(x=0.15)
        tidy(axes)
    names = [row["implementation"] for row in shown]
    grid[0, 0].set_yticks(range(len(names)), [WITHOUT_BIAS.get(name, look(name)["label"]) for name in names])
    grid[0, 0].invert_yaxis()
    figure.suptitle(f"Linear + cross-entropy, {place} ({caption(shown)})", fontsize=9)
    return figure
