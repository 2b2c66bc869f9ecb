"""The figures of attention: speed and memory against the length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from benchmarks.figures.style import caption, latest, legend_below, look, new_figure, tidy

Rows = Sequence[Mapping[str, str]]

_PHASES = ("forward", "backward")


def draw_speed(rows: Rows) -> Figure | None:
    """Draw TFLOP/s against the length: a column for each head dimension and mask, forward above backward."""
    fine = [row for row in rows if row["table"] == "sweep" and row["status"] == "ok" and row["dtype"] == "bf16"]
    # By head dimension, "full" before "causal".
    places = sorted({(int(row["head_dim"]), row["mask"] == "causal", row["mask"]) for row in fine})
    if not places:
        return None
    figure, grid = new_figure(3.1 * max(len(places), 2), 6.0, rows=2, columns=len(places), sharex=True, sharey="row")
    shown: list[Mapping[str, str]] = []
    for column, (head_dim, _, mask) in enumerate(places):
        panel = latest([row for row in fine if (int(row["head_dim"]), row["mask"]) == (head_dim, mask)])
        shown += panel
        for axes, phase in zip(grid[:, column], _PHASES, strict=True):
            lines: dict[str, dict[int, float]] = {}
            for row in panel:
                if row["phase"] == phase:
                    lines.setdefault(row["implementation"], {})[int(row["length"])] = float(row["tflops"])
            for name, points in lines.items():
                axes.plot(*zip(*sorted(points.items()), strict=True), **look(name))
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            tidy(axes)
        grid[0, column].set_title(f"head dimension {head_dim}, {mask}", fontsize=9)
        grid[1, column].set_xlabel("length (tokens)", fontsize=8)
    for axes, phase in zip(grid[:, 0], _PHASES, strict=True):
        axes.set_ylabel(f"{phase}, TFLOP/s", fontsize=8)
        axes.set_ylim(bottom=0)  # after all panels of the row, which share the axis
    figure.suptitle(f"Attention, bf16, 12 heads, 16,384 tokens a batch ({caption(shown)})", fontsize=9)
    legend_below(figure, grid.flat, columns=min(len(places), 3))
    return figure


def draw_memory(rows: Rows) -> Figure | None:
    """Draw the peak of forward and backward against the length, both logarithmic."""
    fine = [row for row in rows if row["table"] == "memory" and row["status"] == "ok" and row["peak_mib"]]
    if not fine:
        return None
    shown = latest(fine)
    lines: dict[str, dict[int, float]] = {}
    for row in shown:
        lines.setdefault(row["implementation"], {})[int(row["length"])] = float(row["peak_mib"])
    figure, grid = new_figure(6.0, 4.6)
    axes = grid[0, 0]
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points.items()), strict=True), **look(name))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.set_xlabel("length (tokens)", fontsize=8)
    axes.set_ylabel("peak of forward + backward, MiB beyond q, k, v", fontsize=8)
    heads, head_dim = shown[0]["heads"], shown[0]["head_dim"]
    axes.set_title(f"Attention, one row, {heads} heads of {head_dim} ({caption(shown)})", fontsize=9)
    tidy(axes)
    legend_below(figure, [axes], columns=2)
    return figure
