"""The figure of the learning curves: validation loss and accuracy against time and against tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from benchmarks.curves.comparison import curve_of, newest_comparison
from benchmarks.figures.style import caption, legend_below, new_figure, tidy

_LOOKS = {
    "fat5": {"color": "#0072B2", "linewidth": 2.0, "label": "FAT5"},
    "transformers": {"color": "#E69F00", "linewidth": 1.4, "label": "Transformers' T5"},
}
_METRICS = {"eval_loss": "validation loss", "eval_accuracy": "masked accuracy"}


def draw_curves(rows: Sequence[Mapping[str, str]]) -> Figure | None:
    """Draw loss (above) and masked accuracy (below) of the held-out text against seconds and tokens."""
    shown = newest_comparison([row for row in rows if row["status"] == "ok"])
    if not shown:
        return None
    figure, grid = new_figure(8.0, 5.6, rows=2, columns=2, sharey="row", sharex="col")
    for column, (name, factor, title) in enumerate((("seconds", 1.0, "seconds"), ("tokens", 1e-6, "million tokens"))):
        for line, metric in enumerate(_METRICS):
            axes = grid[line, column]
            for who, look in _LOOKS.items():
                curve = curve_of(shown, who)
                if curve:
                    axes.plot([float(r[name]) * factor for r in curve], [float(r[metric]) for r in curve], **look)
            if column == 0:
                axes.set_ylabel(_METRICS[metric], fontsize=8)
            if line == 1:
                axes.set_xlabel(title, fontsize=8)
            tidy(axes)
    figure.suptitle(f"The {shown[0]['model']} model on the same batches ({caption(shown)})", fontsize=9)
    legend_below(figure, grid.flat, columns=2)
    return figure
