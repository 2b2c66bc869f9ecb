"""The figure of the optimizer: what part of the memory's speed each step reaches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from benchmarks.figures.bandwidth import draw_shares


def draw_step(rows: Sequence[Mapping[str, str]]) -> Figure | None:
    """Draw the steps in bf16, without the tries of `--sweep`."""
    shown = [
        row
        for row in rows
        if row.get("table") == "step" and row.get("dtype") == "bf16" and " " not in row["implementation"]
    ]
    return draw_shares(shown, "Optimizer step, bf16", lambda row: row["tensors"])
