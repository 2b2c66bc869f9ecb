"""The loss curve of a run, from the Trainer's log history to a PNG."""

from __future__ import annotations

import json
import os
from itertools import cycle
from pathlib import Path
from typing import Any

from fat5.errors import DataError
from fat5.files import atomic_file


def read_log_history(trainer_state: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the log entries of a `trainer_state.json`.

    Raises:
        DataError: the file is no trainer state.
    """
    path = Path(trainer_state)
    try:
        return json.loads(path.read_text(encoding="utf-8"))["log_history"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} holds no training log; expected a trainer_state.json of a run") from error


def plot_loss(
    log_history: list[dict[str, Any]],
    path: str | os.PathLike[str],
    *,
    title: str = "Pretraining",
    baselines: dict[str, float] | None = None,
) -> Path:
    """Draw training and evaluation loss (nats per target token) over the tokens seen, and save a PNG.

    Args:
        log_history: `TrainerState.log_history`.
        path: where the PNG goes.
        title: above the figure.
        baselines: name to loss, each drawn as a dashed line to compare with.

    Raises:
        DataError: the log holds no loss yet.
    """
    train = [(entry["tokens_seen"], entry["loss"]) for entry in log_history if "loss" in entry]
    evaluation = [(entry["tokens_seen"], entry["eval_loss"]) for entry in log_history if "eval_loss" in entry]
    if not train and not evaluation:
        raise DataError("there is no loss to draw: the run has logged nothing yet")
    # Figure and canvas directly: pyplot would pick a screen backend and keep global state in the caller's process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if train:
        axes.plot(*zip(*train, strict=True), color="tab:blue", linewidth=1.2, label="training")
    if evaluation:
        axes.plot(*zip(*evaluation, strict=True), "o-", color="tab:orange", markersize=4, label="evaluation")
    for (name, loss), color in zip((baselines or {}).items(), cycle(("dimgray", "tab:green", "tab:red")), strict=False):
        axes.axhline(loss, linestyle="--", linewidth=1, color=color, label=f"{name} ({loss:.2f})")
    axes.set(
        xlabel="tokens seen (encoder + decoder, without padding)", ylabel="loss (nats per target token)", title=title
    )
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic_file(path) as staging:
        figure.savefig(staging, format="png", dpi=130)
    return Path(path)
