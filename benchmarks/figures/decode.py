"""The figure of attention in a step of decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from benchmarks.decode_attention import Step
from benchmarks.figures.bandwidth import draw_shares


def draw_steps(rows: Sequence[Mapping[str, str]]) -> Figure | None:
    """Draw what share of the copy's speed each implementation reaches."""
    steps = [row for row in rows if row["table"] == "decode"]
    return draw_shares(steps, "Attention in a step of decoding", place)


def place(row: Mapping[str, str]) -> str:
    """Return the workload of a row in a few words."""
    named = {name: row[name] for name in Step.__dataclass_fields__}
    return str(Step(**named))  # type: ignore[arg-type]
