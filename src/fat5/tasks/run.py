"""What a finetuning and an evaluation have in common: data, arithmetic, baselines."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from fat5.data.table_files import Row
from fat5.tasks.registry import task_class
from fat5.tasks.settings import TaskConfig, TaskTraining
from fat5.tasks.splits import Splits, load_splits
from fat5.tasks.task import Inference, Scores, Task
from fat5.training.arguments import resolve_precision

logger = logging.getLogger(__name__)


def open_task(config: TaskConfig, *, need_train: bool) -> tuple[Task, Splits]:
    """Return the task and its data, checked."""
    cls = task_class(config.task)
    return cls(config.options), load_splits(config.task, cls.fields, config.data, need_train=need_train)


def device_of(training: TaskTraining) -> torch.device:
    """Return where to compute."""
    return torch.device("cuda" if training.device == "auto" and torch.cuda.is_available() else "cpu")


def uses_bf16(training: TaskTraining) -> bool:
    """Return whether the arithmetic is bf16.

    Raises:
        ConfigError: A GPU older than Ampere is asked for bf16, which it only emulates.
    """
    return resolve_precision(training.precision, training.device) == "bf16"


def make_inference(training: TaskTraining) -> Inference:
    """Return how predictions are made."""
    return Inference(training.eval_batch_size, device_of(training), bf16=uses_bf16(training))


def warn_of_unseen(task: Task, rows: Sequence[Row], split: str) -> None:
    """Log the classes of `rows` that the model cannot give, since every row of them counts as wrong."""
    unseen = task.unseen_labels(rows)
    if unseen:
        logger.warning(
            "%s holds classes that training has not: %s; the model can only be wrong there", split, ", ".join(unseen)
        )


def baseline_scores(task: Task, splits: Splits) -> dict[str, Scores]:
    """Return the scores of the task's simple methods on the test rows, by name."""
    guesses = task.baselines(splits.train, splits.test)
    return {name: task.score(splits.test, predictions) for name, predictions in guesses.items()}


def data_facts(splits: Splits) -> dict[str, Any]:
    """Return the number of rows of each split, for a result."""
    return {
        "train": len(splits.train),
        "validation": len(splits.validation),
        "test": len(splits.test),
        "judged_on": splits.test_name,
    }
