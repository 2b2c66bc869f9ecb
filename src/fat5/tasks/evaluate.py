"""`evaluate`: any model of Transformers, and the task's simple methods, judged by the same code as a finetuning."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from fat5.errors import ConfigError
from fat5.tasks.encoding import check_length
from fat5.tasks.models import load_task_model, load_task_tokenizer
from fat5.tasks.results import table, write_result
from fat5.tasks.run import baseline_scores, data_facts, device_of, make_inference, open_task, warn_of_unseen
from fat5.tasks.settings import TaskConfig
from fat5.tasks.splits import Splits
from fat5.tasks.task import Scores, Task


def evaluate(config: TaskConfig, *, baselines: bool = False) -> tuple[dict[str, Any], str]:
    """Judge a finetuned model, the task's simple methods, or both, on the test split.

    Args:
        config: The settings of the task; of `training` alone device, precision, eval_batch_size and, where the result
            is to be written, output_dir matter.
        baselines: Judge the simple methods; without a checkpoint nothing else is judged.

    Returns:
        The result, as `result.json` has it, and a table.

    Raises:
        ConfigError: There is nothing to judge, or a setting does not fit.
        CheckpointError: The model has no trained head for the task, or other classes than the data.
        DataError: A file, a column, a split or a value is not what the task needs.
    """
    if config.model.checkpoint is None and not baselines:
        raise ConfigError("nothing to evaluate: name a model, ask for the baselines, or both")
    if config.model.from_scratch:
        raise ConfigError("model.from_scratch is for finetuning; evaluation needs trained weights")
    task, splits = open_task(config, need_train=baselines)
    columns: dict[str, Scores] = {}
    result: dict[str, Any] = {
        "task": config.task,
        "model": config.model.checkpoint,
        "data": {"source": config.data.source, **data_facts(splits)},
    }
    if config.model.checkpoint is not None:
        started = time.perf_counter()
        scores = _model_scores(config, task, splits)
        result |= {"scores": scores, "seconds": round(time.perf_counter() - started, 2)}
        columns[Path(config.model.checkpoint).name] = scores
    if baselines:
        result["baselines"] = baseline_scores(task, splits)
        columns |= result["baselines"]
    leading = task.leading(next(iter(columns.values())))
    result["metric"] = leading
    text = f"{config.task}, {splits.test_name}: {len(splits.test)} rows\n\n{table(columns, leading)}"
    if config.training.output_dir is not None:
        write_result(Path(config.training.output_dir), result, text)
    return result, text


@torch.inference_mode()
def _model_scores(config: TaskConfig, task: Task, splits: Splits) -> Scores:
    tokenizer = load_task_tokenizer(config.model)
    model, _ = load_task_model(task, config.model, tokenizer, finetuned=True)
    check_length(model, config.options.max_length, "options.max_length")
    task.adopt_labels(model.config, splits.test)
    warn_of_unseen(task, splits.test, splits.test_name)
    model.to(device_of(config.training)).eval()
    return task.score(splits.test, task.predict(model, tokenizer, splits.test, make_inference(config.training)))
