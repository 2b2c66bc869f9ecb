"""The figure of the data pipeline: tokens per second against worker processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from benchmarks.figures.style import latest, legend_below, new_figure, tidy

_LOOKS = {
    "False": {"color": "#0072B2", "label": "pageable memory"},
    "True": {"color": "#E69F00", "label": "pinned memory"},
}
_WIDTH = 0.36


def draw_workers(rows: Sequence[Mapping[str, str]]) -> Figure | None:
    """Draw real tokens per second against the number of workers; 0 is the training process itself."""
    fine = [row for row in rows if row["table"] == "workers" and row["status"] == "ok"]
    if not fine:
        return None
    shown = latest(fine)
    figure, grid = new_figure(6.0, 4.2)
    axes = grid[0, 0]
    ticks = sorted({int(row["workers"]) for row in shown})
    variants = [pinned for pinned in _LOOKS if any(row["pin_memory"] == pinned for row in shown)]
    for side, pinned in enumerate(variants):
        points = sorted(
            (ticks.index(int(row["workers"])), float(row["tokens_per_s"]) / 1e6)
            for row in shown
            if row["pin_memory"] == pinned
        )
        shift = _WIDTH * (side - (len(variants) - 1) / 2)
        axes.bar([place + shift for place, _ in points], [y for _, y in points], _WIDTH, **_LOOKS[pinned])
    axes.set_xticks(range(len(ticks)), [str(tick) for tick in ticks])
    axes.set_xlabel("worker processes (0: in the training process)", fontsize=8)
    axes.set_ylabel("real tokens per second, millions", fontsize=8)
    cores, day = shown[0]["cores_allowed"], shown[0]["date"][:10]
    axes.set_title(f"Denoising collator, {shown[0]['denoisers']} mixture ({cores} cores; {day})", fontsize=9)
    tidy(axes)
    legend_below(figure, [axes], columns=2)
    return figure
