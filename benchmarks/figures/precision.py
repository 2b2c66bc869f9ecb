"""The figure of number formats: loss against steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from benchmarks.figures.style import caption, latest, legend_below, new_figure, tidy

_LOOKS = {
    "fp32": {"color": "#000000", "label": "fp32", "linewidth": 2.2},
    "bf16-kahan": {"color": "#0072B2", "label": "bf16 with Kahan summation", "linewidth": 1.2},
    "bf16": {"color": "#D55E00", "label": "bf16 without", "linewidth": 1.2},
}


def draw_curves(rows: Sequence[Mapping[str, str]]) -> Figure | None:
    """Draw the loss of each run above, and its distance from float32 below."""
    shown = latest([row for row in rows if row["table"] == "curve"])
    curves: dict[str, dict[int, float]] = {}
    for row in shown:
        curves.setdefault(row["implementation"], {})[int(row["step"])] = float(row["loss"])
    if "fp32" not in curves:
        return None
    figure, grid = new_figure(6.4, 5.6, rows=2, sharex=True, height_ratios=(2, 1))
    above, below = grid[:, 0]
    base = curves["fp32"]
    for name, style in _LOOKS.items():
        points = sorted(curves.get(name, {}).items())
        if not points:
            continue
        above.plot(*zip(*points, strict=True), **style)
        below.plot([step for step, _ in points], [100 * (loss / base[step] - 1) for step, loss in points], **style)
    above.set_ylabel("training loss, mean of equal parts", fontsize=8)
    below.set_ylabel("% from fp32", fontsize=8)
    below.set_xlabel("optimizer steps", fontsize=8)
    figure.suptitle(f"The quickstart's model, AdamWScale ({caption(shown)})", fontsize=9)
    for axes in (above, below):
        tidy(axes)
    legend_below(figure, [above], columns=3)
    return figure
