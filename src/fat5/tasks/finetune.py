"""`finetune`: a pretrained model to a model of a task, once a seed, judged on the test split."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TrainingArguments, set_seed

from fat5.errors import ConfigError
from fat5.files import atomic_directory, atomic_file
from fat5.optim import build_optimizer, build_schedule
from fat5.tasks.encoding import check_length
from fat5.tasks.energy import measured_energy
from fat5.tasks.models import add_adapters, load_task_model, load_task_tokenizer, without_adapters
from fat5.tasks.results import RESULT_NAME, read_result, summarize, table, write_result
from fat5.tasks.run import (
    baseline_scores,
    data_facts,
    device_of,
    make_inference,
    open_task,
    uses_bf16,
    warn_of_unseen,
)
from fat5.tasks.settings import TaskConfig
from fat5.tasks.splits import Splits
from fat5.tasks.task import Feature, Task
from fat5.tasks.trainer import TaskTrainer
from fat5.training.config_file import flatten, load_settings, to_yaml
from fat5.training.interruption import StopCallback, StopRequest
from fat5.training.progress import library_bars_hidden

logger = logging.getLogger(__name__)

CONFIG_NAME = "finetune.yaml"
# What a later run in the same folder may change: how many seeds there are, and what is watched.
_FREE = frozenset(f"training.{name}" for name in ("output_dir", "seeds", "log_every", "report_to", "eval_batch_size"))


@dataclass(frozen=True)
class FinetuneResult:
    """How a finetuning ended.

    Attributes:
        output_dir: Its folder.
        summary: What `result.json` holds; empty where a signal came before the first seed was done.
        text: The table of `result.md`.
        stopped_by: The signal that ended it early, None if it is complete.
    """

    output_dir: Path
    summary: dict[str, Any]
    text: str
    stopped_by: signal.Signals | None = None


def finetune(config: TaskConfig, *, with_baselines: bool = False) -> FinetuneResult:
    """Finetune a checkpoint once a seed and write models, results, and a table.

    Whatever is wrong with settings or data is found before the first step. Each seed's folder, `seed-N`, appears when
    it is complete; a seed that is there is not trained again, so that the same call goes on after an interruption.

    Args:
        config: The settings; they are saved as `finetune.yaml`.
        with_baselines: Score the task's simple methods, too.

    Raises:
        ConfigError: A setting does not fit the data, the model or the machine, or the folder holds the results of
            other settings.
        DataError: A file, a column, a split or a value is not what the task needs.
        CheckpointError: The model cannot be loaded with the task's head.
    """
    training = config.training
    if training.output_dir is None:
        raise ConfigError("training.output_dir is missing: the folder of the results")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("a finetuning uses one GPU; run it without torchrun, other seeds or tasks on the other GPUs")
    if config.lora is not None and config.model.from_scratch:
        raise ConfigError("lora adapts pretrained weights, and model.from_scratch asks for random ones; leave one out")
    task, splits = open_task(config, need_train=True)
    task.learn_labels(splits.train)
    for rows, name in ((splits.validation, "validation"), (splits.test, splits.test_name)):
        warn_of_unseen(task, rows, name)
    tokenizer = load_task_tokenizer(config.model)
    output_dir = Path(training.output_dir)
    _claim(output_dir, config)
    features: list[Feature] = []
    stopped = None
    for seed in range(training.seed, training.seed + training.seeds):
        folder = output_dir / f"seed-{seed}"
        if (folder / RESULT_NAME).is_file():
            logger.info("seed %d is done: %s", seed, folder)
            continue
        stopped, features = _train_seed(config, task, splits, tokenizer, seed, folder, features)
        if stopped is not None:
            break
    return _conclude(config, task, splits, output_dir, stopped, with_baselines)


def _claim(output_dir: Path, config: TaskConfig) -> None:
    """Save the settings; refuse a folder with the results of others."""
    path = output_dir / CONFIG_NAME
    if path.is_file():
        then = {key: value for key, value in flatten(load_settings(type(config), path)).items() if key not in _FREE}
        now = {key: value for key, value in flatten(config).items() if key not in _FREE}
        changed = [
            f"{key} was {then.get(key)!r}, now {now.get(key)!r}"
            for key in sorted(then.keys() | now.keys())
            if then.get(key) != now.get(key)
        ]
        if changed:
            raise ConfigError(
                f"{output_dir} holds results of other settings: {'; '.join(changed)}. Restore them to go on, or name "
                "another training.output_dir"
            )
    elif output_dir.is_dir() and any(output_dir.iterdir()):
        raise FileExistsError(f"{output_dir} is not empty and holds no finetuning; name another training.output_dir")
    with atomic_file(path) as staging:
        staging.write_text(to_yaml(config), encoding="utf-8")


def _train_seed(
    config: TaskConfig,
    task: Task,
    splits: Splits,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    folder: Path,
    features: list[Feature],
) -> tuple[signal.Signals | None, list[Feature]]:
    training, device = config.training, device_of(config.training)
    set_seed(seed)
    with measured_energy(training.country) as energy:
        started = time.perf_counter()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        model, new_weights = load_task_model(task, config.model, tokenizer)
        check_length(model, config.options.max_length, "options.max_length")
        features = features or task.encode(splits.train, tokenizer)
        if config.lora is not None:
            model = add_adapters(model, task, config.lora, new_weights)
        if training.gradient_checkpointing:
            # Transformers 5 renames it on the way; the older name warns in the newer releases.
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        model.to(device)
        trainer = _make_trainer(config, task, splits, tokenizer, seed, model, features)
        if seed == training.seed:
            trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
            logger.info(
                "%s: %.1f M parameters, %.1f M of them trained, on %s; %d training rows, %s steps",
                task.name,
                model.num_parameters() / 1e6,
                trained / 1e6,
                device,
                len(splits.train),
                f"{trainer.args.max_steps:,}",
            )
        with StopRequest() as request:
            stop = StopCallback(request)
            trainer.add_callback(stop)
            trainer.train()
        if stop.stopped_by is not None:
            return stop.stopped_by, features
        if _last_evaluation(trainer) < trainer.state.global_step:
            trainer.evaluate()
        seconds = time.perf_counter() - started
        trainer.best.restore(model)
        scores = trainer.scores(splits.test)
        peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else None
    result = {
        "seed": seed,
        "scores": scores,
        "validation": {"score": trainer.best.score, "step": trainer.best.step},
        "steps": trainer.state.global_step,
        "seconds": round(seconds, 2),
        "peak_mib": peak,
        **energy,
    }
    leading = task.leading(scores)
    logger.info("seed %d: %s %.2f on %s (%.0f s)", seed, leading, scores[leading], splits.test_name, seconds)
    with atomic_directory(folder) as staging:
        if training.save_model:
            with library_bars_hidden():
                without_adapters(model).save_pretrained(staging)
                tokenizer.save_pretrained(staging)
        write_result(staging, result)
    return None, features


def _last_evaluation(trainer: TaskTrainer) -> int:
    history = trainer.state.log_history
    return max((int(entry["step"]) for entry in history if any(key.startswith("eval_") for key in entry)), default=-1)


def _make_trainer(
    config: TaskConfig,
    task: Task,
    splits: Splits,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    model: Any,
    features: list[Feature],
) -> TaskTrainer:
    training = config.training
    rows_per_step = training.batch_size * training.gradient_accumulation_steps
    steps_per_epoch = max(1, math.ceil(len(features) / rows_per_step))
    max_steps = training.max_steps or max(1, round(training.epochs * steps_per_epoch))
    arguments = TrainingArguments(
        output_dir=_logs(training.output_dir, seed) if training.report_to else tempfile.gettempdir(),
        max_steps=max_steps,
        per_device_train_batch_size=training.batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        max_grad_norm=training.max_grad_norm,
        bf16=uses_bf16(training),
        use_cpu=device_of(training).type == "cpu",
        logging_steps=training.log_every,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=training.eval_every or steps_per_epoch,
        save_strategy="no",
        report_to=list(training.report_to) or "none",
        remove_unused_columns=False,
        seed=seed,
        use_cache=True,
        # Else each batch's copy waits for all that the device has to do.
        accelerator_config={"non_blocking": device_of(training).type == "cuda"},
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # else the Trainer would split batches over all with DataParallel
    optimizer = build_optimizer(model, config.optimizer)
    return TaskTrainer(
        task=task,
        validation=splits.validation,
        inference=make_inference(training),
        patience=training.patience,
        max_seconds=training.max_seconds,
        model=model,
        args=arguments,
        train_dataset=features,
        eval_dataset=splits.validation,
        processing_class=tokenizer,
        optimizers=(optimizer, build_schedule(optimizer, config.schedule, num_training_steps=max_steps)),
    )


def _logs(output_dir: str | None, seed: int) -> str:
    return str(Path(str(output_dir)) / "logs" / f"seed-{seed}")


def _conclude(
    config: TaskConfig,
    task: Task,
    splits: Splits,
    output_dir: Path,
    stopped: signal.Signals | None,
    with_baselines: bool,
) -> FinetuneResult:
    training = config.training
    folders = [output_dir / f"seed-{seed}" for seed in range(training.seed, training.seed + training.seeds)]
    runs = [read_result(folder) for folder in folders if (folder / RESULT_NAME).is_file()]
    if not runs:
        return FinetuneResult(output_dir, {}, "", stopped)
    baselines = baseline_scores(task, splits) if with_baselines else {}
    leading = task.leading(runs[0]["scores"])
    best = max(runs, key=lambda run: run["validation"]["score"])["seed"]
    result = {
        "task": config.task,
        "model": config.model.checkpoint,
        "from_scratch": config.model.from_scratch,
        "metric": leading,
        "data": {"source": config.data.source, **data_facts(splits)},
        "scores": summarize([run["scores"] for run in runs]),
        "baselines": baselines,
        "best_seed": best,
        "runs": runs,
    }
    columns = {f"{training.seeds} seeds" if training.seeds > 1 else "model": result["scores"], **baselines}
    text = f"{config.task}, {splits.test_name}: {len(splits.test)} rows\n\n{table(columns, leading)}"
    write_result(output_dir, result, text)
    return FinetuneResult(output_dir, result, text, stopped)


def with_changes(config: TaskConfig, **changes: Any) -> TaskConfig:
    """Return the settings with some replaced, `section__key=value`."""
    for name, value in changes.items():
        section, key = name.split("__")
        config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{key: value})})
    return config


def best_model(output_dir: Path) -> Path:
    """Return the folder of the model that was best on the validation split, of those that `finetune` saved."""
    return output_dir / f"seed-{read_result(output_dir)['best_seed']}"
