"""`sweep`: every checkpoint of a pretraining run finetuned on some tasks, and the scores against the tokens seen."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fat5.errors import CheckpointError, ConfigError
from fat5.files import atomic_file
from fat5.tasks.finetune import finetune, with_changes
from fat5.tasks.results import write_result
from fat5.tasks.settings import TaskConfig
from fat5.training.checkpoints import list_checkpoints, verify_checkpoint

logger = logging.getLogger(__name__)

FIGURE_NAME = "sweep.png"


@dataclass(frozen=True)
class SweepResult:
    """How a sweep ended.

    Attributes:
        output_dir: Its folder.
        points: One entry a task and checkpoint: task, checkpoint, tokens_seen, metric, mean, spread.
        stopped_by: The signal that ended it early, None if it is complete.
    """

    output_dir: Path
    points: list[dict[str, Any]]
    stopped_by: signal.Signals | None = None


def sweep(
    run: str | os.PathLike[str], configs: dict[str, TaskConfig], output_dir: str | os.PathLike[str]
) -> SweepResult:
    """Finetune every checkpoint of a run on every task; write `result.json` and draw `sweep.png` as points come.

    A finetuning that is complete is not repeated, so that the same call goes on after an interruption, or after the run
    has saved more checkpoints.

    Args:
        run: Folder of a pretraining run; `training.save_total_limit` says how many checkpoints it keeps.
        configs: Name of a task's data to its settings; their model and output_dir are set here.
        output_dir: Folder of the results.

    Raises:
        CheckpointError: The run has no checkpoint, or one is damaged.
        ConfigError: There is no task.
    """
    if not configs:
        raise ConfigError("a sweep needs the settings of at least one task, such as configs/tasks/topic_fr.yaml")
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        raise CheckpointError(f"{run} holds no checkpoint; expected folders such as checkpoint-1000 of `fat5 pretrain`")
    tokens = {checkpoint: int(verify_checkpoint(checkpoint)["tokens_seen"]) for checkpoint in checkpoints}
    root = Path(output_dir)
    points: list[dict[str, Any]] = []
    for checkpoint in checkpoints:
        for name, config in configs.items():
            own = with_changes(
                config,
                model__checkpoint=str(checkpoint),
                training__output_dir=str(root / name / checkpoint.name),
                training__save_model=False,
            )
            logger.info("%s on %s", checkpoint, name)
            result = finetune(own)
            if result.stopped_by is not None:
                return SweepResult(root, points, result.stopped_by)
            points.append(_point(name, checkpoint, tokens[checkpoint], result.summary))
            write_result(root, {"run": str(run), "points": points})
            plot_sweep(points, root / FIGURE_NAME)
    return SweepResult(root, points)


def _point(name: str, checkpoint: Path, tokens_seen: int, summary: dict[str, Any]) -> dict[str, Any]:
    metric = summary["metric"]
    score = summary["scores"][metric]
    return {
        "task": name,
        "checkpoint": checkpoint.name,
        "tokens_seen": tokens_seen,
        "metric": metric,
        "mean": score["mean"],
        "spread": score["spread"],
    }


def plot_sweep(points: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw each task's score against the tokens of pretraining, with the spread over seeds as bars, as a PNG."""
    # Figure and canvas directly: pyplot would pick a screen backend and keep global state in the caller's process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name in dict.fromkeys(point["task"] for point in points):
        own = [point for point in points if point["task"] == name]
        axes.errorbar(
            [point["tokens_seen"] for point in own],
            [point["mean"] for point in own],
            yerr=[point["spread"] or 0.0 for point in own],
            marker="o",
            markersize=4,
            capsize=3,
            label=f"{name} ({own[0]['metric']})",
        )
    axes.set(xlabel="tokens seen in pretraining", ylabel="score on the test split (%)")
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic_file(path) as staging:
        figure.savefig(staging, format="png", dpi=130)
