"""The figures of the docs, drawn from the CSV files alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.elementwise import places
from benchmarks.figures import attention, collator, curves, decode, loss, models, optimizer, precision
from benchmarks.figures.bandwidth import draw_shares
from benchmarks.results import read_rows
from fat5.files import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_Draw = Callable[[list[dict[str, str]]], "Figure | None"]

FIGURES: dict[str, tuple[str, _Draw]] = {
    "attention_speed": ("attention", attention.draw_speed),
    "attention_memory": ("attention", attention.draw_memory),
    "collator_workers": ("collator", collator.draw_workers),
    "rms_norm": ("rms_norm", partial(draw_shares, title="RMS norm", place=places.rms_norm)),
    "rotary": ("rotary", partial(draw_shares, title="Rotary embedding", place=places.rotary)),
    "geglu": ("geglu", partial(draw_shares, title="Gated GELU", place=places.geglu)),
    "cross_entropy": ("cross_entropy", loss.draw_logits),
    "linear_cross_entropy": ("linear_cross_entropy", loss.draw_hidden),
    "optimizer": ("optimizer", optimizer.draw_step),
    "precision": ("precision", precision.draw_curves),
    "curves": ("curves", curves.draw_curves),
    "decode": ("decode", decode.draw_steps),
    "pretrain": ("pretrain", models.draw_step),
    "pretrain_shares": ("pretrain", models.draw_step_shares),
    "scaling": ("scaling", models.draw_scaling),
    "generation": ("generation", models.draw_generation),
    "heads": ("heads", models.draw_heads),
    "tasks": ("tasks", models.draw_tasks),
}
"""By the name of the file: the case it is drawn from, and a function that returns None where rows are missing."""


def draw_all(results: Path, folder: Path) -> Iterator[str]:
    """Draw every figure for which there are rows, and yield a line about each."""
    for name, (case, draw) in FIGURES.items():
        source = results / f"{case}.csv"
        figure = draw(read_rows(source))
        if figure is None:
            yield f"{name}: skipped, {source} holds no rows for it; run python -m benchmarks {case}"
            continue
        target = folder / f"{name}.png"
        with atomic_file(target) as staging:
            figure.savefig(staging, format="png", dpi=150)
        yield f"{name}: {target}"
