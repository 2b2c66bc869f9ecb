"""Settings of a finetuning and of an evaluation: what their commands read from YAML and the command line."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from fat5.errors import ConfigError, nearest
from fat5.optim import OptimizerConfig, ScheduleConfig
from fat5.tasks.registry import TASKS, task_class
from fat5.tasks.splits import TaskData
from fat5.training.config_file import load_settings, settings_file


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters in the place of a full finetuning (Hu et al., arXiv:2106.09685), through PEFT.

    The adapters are merged into the weights at the end, so that the saved model loads like any other.

    Attributes:
        rank: Rank of the adapters.
        alpha: The adapters' output is scaled by alpha / rank; null for twice the rank.
        dropout: Dropout before the adapters.
        targets: Names of the linear layers that get one; null for all of attention and feed-forward.
    """

    rank: int = 16
    alpha: float | None = None
    dropout: float = 0.0
    targets: list[str] | None = None

    def __post_init__(self) -> None:
        if self.rank < 1 or not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"lora: expected rank >= 1 and dropout in [0, 1), got {self.rank} and {self.dropout}")


@dataclass(frozen=True)
class ModelSettings:
    """What is finetuned or evaluated.

    Attributes:
        checkpoint: Folder or hub name of a FAT5 model, of T5's family, or of any model of Transformers that has the
            task's head.
        tokenizer: Folder or hub name of the tokenizer; null for the one beside the checkpoint.
        from_scratch: Take the checkpoint's sizes but random weights: the twin that shows what pretraining is worth.
        dropout: Dropout in every place where the model has one, the head included; null for the checkpoint's own.
    """

    checkpoint: str | None = None
    tokenizer: str | None = None
    from_scratch: bool = False
    dropout: float | None = None

    def __post_init__(self) -> None:
        if self.dropout is not None and not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"model.dropout is {self.dropout}, expected 0 or more, below 1")


@dataclass(frozen=True)
class TaskTraining:
    """How long and how to train, how often, and where the results go.

    Attributes:
        output_dir: Folder of the results: a model and a result for each seed, result.json and result.md over all.
        seeds: Repeat the training with so many seeds and report mean and spread.
        seed: The first of them.
        epochs: Passes over the training rows.
        max_steps: Optimiser steps, in the place of epochs.
        max_seconds: Stop the training after so many seconds; the learning rate's schedule then ends with them. null for
            no limit.
        batch_size: Rows a batch.
        eval_batch_size: Rows a batch in evaluations.
        gradient_accumulation_steps: Batches an optimiser step.
        eval_every: Evaluate on the validation split every so many steps; null for every epoch.
        patience: Stop after so many evaluations in a row that were no better; null for never.
        precision: "bf16": fp32 weights, bf16 arithmetic; "fp32"; "auto": bf16 on GPUs that have it.
        device: "auto": the GPU if there is one; "cpu".
        max_grad_norm: Clip the gradients to this norm; 0 for no clipping.
        gradient_checkpointing: Recompute activations in the backward pass: less memory, about a third more time.
        log_every: Log every so many steps.
        report_to: Where logs go besides the results, such as [tensorboard]; [] for nowhere.
        save_model: Save each seed's best model.
        country: Three-letter code of the country whose electricity is used, for the CO2; null to measure no energy.
            Needs the package codecarbon (the extra `accounts`), and is skipped without it.
    """

    output_dir: str | None = None
    seeds: int = 1
    seed: int = 0
    epochs: float = 3.0
    max_steps: int | None = None
    max_seconds: float | None = None
    batch_size: int = 16
    eval_batch_size: int = 32
    gradient_accumulation_steps: int = 1
    eval_every: int | None = None
    patience: int | None = 3
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    device: Literal["auto", "cpu"] = "auto"
    max_grad_norm: float = 1.0
    gradient_checkpointing: bool = False
    log_every: int = 50
    report_to: list[str] = field(default_factory=list)
    save_model: bool = True
    country: str | None = "FRA"

    def __post_init__(self) -> None:
        least = {"seeds": 1, "seed": 0, "max_steps": 1, "batch_size": 1, "eval_batch_size": 1, "eval_every": 1}
        least |= {"gradient_accumulation_steps": 1, "patience": 1, "max_grad_norm": 0, "log_every": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and not value >= bound:
                raise ConfigError(f"training.{name} is {value}, expected at least {bound}")
        for name in ("epochs", "max_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"training.{name} is {value}, expected more than 0")


def _finetuning_optimizer() -> OptimizerConfig:
    return OptimizerConfig(name="adamw", lr=3e-4)


@dataclass(frozen=True)
class TaskConfig:
    """All settings of a finetuning.

    Attributes:
        task: Name of the task.
        data: The data.
        model: The model.
        training: The training.
        lora: Adapters in the place of a full finetuning; null for none.
        optimizer: The optimiser.
        schedule: The learning rate over time.
    """

    task: str
    data: TaskData = field(default_factory=TaskData)
    model: ModelSettings = field(default_factory=ModelSettings)
    training: TaskTraining = field(default_factory=TaskTraining)
    lora: LoraSettings | None = None
    optimizer: OptimizerConfig = field(default_factory=_finetuning_optimizer)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    options: Any = field(init=False, repr=False, default=None)


def config_class(task: str) -> type[TaskConfig]:
    """Return the settings of a task: those of every task, and its own under `options`.

    Raises:
        ConfigError: There is no such task.
    """
    options = task_class(task).Options
    cls = dataclasses.make_dataclass(
        "TaskConfig", [("options", options, field(default_factory=options))], bases=(TaskConfig,), frozen=True
    )
    cls.__doc__ = f"{inspect.cleandoc(TaskConfig.__doc__ or '')}\n    options: What only {task} has.\n"
    cls.__module__ = __name__
    return cls


def load_task_config(
    task: str | None, path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()
) -> TaskConfig:
    """Read the settings of a task from YAML and overrides.

    Args:
        task: Name of the task; None takes it from the file.
        path: A YAML file, or None.
        overrides: `section.key=value`.

    Raises:
        ConfigError: As `load_settings`; or no task is named, an unknown one, or another one than in the file.
        FileNotFoundError: There is no such file.
    """
    named = _task_of(path)
    if task is not None and named is not None and named != task:
        raise ConfigError(f"{path} holds settings of {named}, not of {task}")
    task = task or named
    if task is None:
        raise ConfigError(f"no task is named; expected one of {', '.join(TASKS)}")
    return load_settings(config_class(task), path, [f"task={task}", *overrides])


def _task_of(path: str | os.PathLike[str] | None) -> str | None:
    if path is None:
        return None
    try:
        settings = yaml.safe_load(settings_file(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        return None  # load_settings has the message
    task = settings.get("task") if isinstance(settings, dict) else None
    if task is not None and task not in TASKS:
        raise ConfigError(f"{path}: task is {task!r}, expected one of {', '.join(TASKS)}{nearest(str(task), TASKS)}")
    return task
