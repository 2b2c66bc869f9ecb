"""`pretrain`: from a configuration to a trained model, checked before any work and resumable at any step."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback, ProgressCallback, TrainingArguments, set_seed

from fat5.errors import CheckpointError
from fat5.files import atomic_file
from fat5.models import FAT5Config, FAT5ForConditionalGeneration
from fat5.optim import build_optimizer, build_schedule, is_sharded
from fat5.training.account_book import AccountBook, AccountsCallback, describe_accounts
from fat5.training.arguments import resolve_precision, training_arguments
from fat5.training.checkpoints import STAGING, clear_staging, list_checkpoints
from fat5.training.compilation import Compilation, cache_folder, choose_compilation, compile_model
from fat5.training.config import PretrainConfig
from fat5.training.config_file import to_yaml
from fat5.training.graph_trainer import GraphTrainer
from fat5.training.initial_weights import keep_rounding_errors, load_initial_model
from fat5.training.interruption import StopCallback, StopRequest
from fat5.training.plot import plot_loss, read_log_history
from fat5.training.profiling import ProfileCallback
from fat5.training.progress import RunProgress, library_bars_hidden
from fat5.training.resume import ResumePoint, check_weights, checkpoint_facts, find_resume_point
from fat5.training.run_data import RunData, open_run_data
from fat5.training.sharded_trainer import ShardedTrainer
from fat5.training.sharding import blocks_of, resolve_shard_degree, shard_model, whole_weights
from fat5.training.trainer import PretrainTrainer

logger = logging.getLogger(__name__)

CONFIG_NAME = "pretrain.yaml"
STATE_NAME = "trainer_state.json"
CURVE_NAME = "loss.png"


@dataclass(frozen=True)
class PretrainResult:
    """How a run ended.

    Attributes:
        output_dir: The run's folder; after a completed run it holds the model, its tokenizer and the loss curve.
        step: Optimiser steps done.
        max_steps: Steps asked for.
        log_history: All log entries, those before a resume included.
        checkpoint: The newest checkpoint.
        stopped_by: The signal that ended the run early, None if it is complete.
    """

    output_dir: Path
    step: int
    max_steps: int
    log_history: list[dict[str, Any]]
    checkpoint: Path
    stopped_by: signal.Signals | None = None

    @property
    def evaluation(self) -> dict[str, float]:
        """The last evaluation, empty if there was none."""
        return next((entry for entry in reversed(self.log_history) if "eval_loss" in entry), {})


def pretrain(config: PretrainConfig) -> PretrainResult:
    """Train a model, or go on with a run that was stopped.

    Whatever is wrong with the settings, the data or a checkpoint is found before the first step. SIGTERM or Ctrl+C ends
    the run after the current step, with a checkpoint. Under `torchrun` each GPU trains on its share of one stream.

    Args:
        config: The run's settings; they are saved as `pretrain.yaml` in the output folder.

    Raises:
        ConfigError: A setting does not fit the data, the machine or the checkpoint to go on from.
        DataError: The data is missing, damaged or made with another tokenizer.
        CheckpointError: The checkpoint to go on from is damaged, or one could not be saved.
        FileExistsError: The output folder holds another run's checkpoints and `resume` is false.
    """
    data = open_run_data(config.data, config.denoising)
    special = data.special_tokens
    model_config = config.model.build(len(data.tokenizer), pad=special.pad, eos=special.eos, bos=special.bos)
    precision = resolve_precision(config.training.precision, config.training.device)
    arguments = training_arguments(config.training, evaluate=data.validation is not None, precision=precision)
    facts = checkpoint_facts(
        config,
        precision=precision,
        batches_per_step=arguments.world_size * config.training.gradient_accumulation_steps,
        data=data.describe(),
    )
    resume = find_resume_point(config, facts)
    arguments.max_steps = config.training.steps(data.slots * facts["batches_per_step"])
    arguments.eval_on_start = config.training.eval_at_start and data.validation is not None and resume is None
    if resume is not None and resume.step >= arguments.max_steps:
        return _already_complete(config, resume, arguments.max_steps)

    set_seed(config.training.seed)
    model: Any = _initial_model(config, model_config, len(data.tokenizer))
    exact = None
    if precision == "bf16":
        if config.training.init_from is not None and resume is None:
            # The tensors of now: rounding puts new ones into the parameters.
            exact = {name: parameter.detach() for name, parameter in model.named_parameters()}
        model.to(torch.bfloat16)
    if config.training.gradient_checkpointing:
        # Transformers 5 renames it on the way; the older name warns in the newer releases.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    if resume is not None:
        check_weights(resume.checkpoint, model)
    # Before the optimiser is built: where the parameters lie decides its form.
    model.to(arguments.device)
    compilation = _place(model, config, arguments)
    optimizer = build_optimizer(model, config.optimizer)
    if exact is not None:
        keep_rounding_errors(exact, model, optimizer)
    schedule = build_schedule(optimizer, config.schedule, num_training_steps=arguments.max_steps)
    if arguments.should_save:
        _prepare_folder(config)
    trainer = _build_trainer(config, data, arguments, (model, optimizer, schedule), facts, resume, compilation)
    _announce(trainer, data, precision, resume, compilation)
    return _train(trainer, resume, _open_accounts(config, arguments, resume))


def _initial_model(
    config: PretrainConfig, model_config: FAT5Config, tokenizer_length: int
) -> FAT5ForConditionalGeneration:
    if config.training.init_from is None:
        return FAT5ForConditionalGeneration(model_config)
    with library_bars_hidden():
        return load_initial_model(config.training.init_from, config.model, model_config, tokenizer_length).train()


def _place(
    model: FAT5ForConditionalGeneration, config: PretrainConfig, arguments: TrainingArguments
) -> Compilation | None:
    """Compile the model and spread it over the ranks, as the settings ask for; return how it was compiled, or None."""
    degree = resolve_shard_degree(config.training.data_parallel_shard_degree, arguments.world_size)
    compilation = None
    if config.training.compile:
        compilation = choose_compilation(config.training.compile_mode, model, config.denoising, sharded=degree > 1)
        compile_model(model, compilation.mode, blocks=blocks_of(model) if degree > 1 else None)
    if degree > 1:
        shard_model(model, degree, arguments.world_size, arguments.device)
    return compilation


def _open_accounts(
    config: PretrainConfig, arguments: TrainingArguments, resume: ResumePoint | None
) -> AccountBook | None:
    if not arguments.should_save:
        return None
    on_gpu = arguments.device.type == "cuda"
    return AccountBook(
        Path(config.training.output_dir),
        config.accounts,
        device=torch.cuda.get_device_name(arguments.device) if on_gpu else "cpu",
        devices=arguments.world_size,
        machines=max(1, arguments.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
        resumed=resume is not None,
    )


def _prepare_folder(config: PretrainConfig) -> None:
    output_dir = Path(config.training.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    clear_staging(output_dir)
    with atomic_file(output_dir / CONFIG_NAME) as staging:
        staging.write_text(to_yaml(config), encoding="utf-8")


def _build_trainer(
    config: PretrainConfig,
    data: RunData,
    arguments: TrainingArguments,
    parts: tuple[FAT5ForConditionalGeneration, Optimizer, LambdaLR],
    facts: dict[str, Any],
    resume: ResumePoint | None,
    compilation: Compilation | None,
) -> PretrainTrainer:
    rank, world_size = arguments.process_index, arguments.world_size
    start_batch = resume.step * arguments.gradient_accumulation_steps if resume else 0
    model, optimizer, schedule = parts
    kind = PretrainTrainer
    if any(map(is_sharded, model.parameters())):
        kind = ShardedTrainer
    elif compilation is not None and compilation.cuda_graphs:
        kind = GraphTrainer
    trainer = kind(
        model=model,
        args=arguments,
        train_dataset=data.training_set(rank=rank, world_size=world_size, start_batch=start_batch),
        eval_dataset=data.evaluation_set(rank=rank, world_size=world_size),
        processing_class=data.tokenizer,
        optimizers=(optimizer, schedule),
        num_tokens=data.num_tokens,
        structural_ids={*data.special_tokens.sentinels, data.special_tokens.eos},
        max_eval_batches=config.training.eval_batches,
        keep_checkpoints=config.training.save_total_limit,
        checkpoint_facts=facts,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(RunProgress())
    if config.training.profile and arguments.should_save:
        trainer.add_callback(ProfileCallback(config.training.profile, Path(config.training.output_dir)))
    if resume is not None:
        trainer.load_data_state(resume.checkpoint, start_batch)
    return trainer


def _announce(
    trainer: PretrainTrainer,
    data: RunData,
    precision: str,
    resume: ResumePoint | None,
    compilation: Compilation | None,
) -> None:
    if not trainer.args.should_save:
        return
    arguments, model = trainer.args, cast(FAT5ForConditionalGeneration, trainer.model)
    slots = data.slots * arguments.world_size * arguments.gradient_accumulation_steps
    logger.info(
        "model: %.1f M parameters, %s on %s; data: %s; %s steps of %s token slots",
        model.num_parameters() / 1e6,
        precision,
        arguments.device if arguments.world_size == 1 else f"{arguments.world_size} x {arguments.device.type}",
        data.summary,
        f"{arguments.max_steps:,}",
        f"{slots:,}",
    )
    if compilation is not None:
        logger.info(
            "%s; the first step compiles the model, and compiled code is kept in %s", compilation.reason, cache_folder()
        )
    if resume is not None:
        logger.info("going on from %s", resume.checkpoint)


def _train(trainer: PretrainTrainer, resume: ResumePoint | None, book: AccountBook | None) -> PretrainResult:
    output_dir = trainer.output_dir
    with StopRequest() as request, book or nullcontext():
        stop = StopCallback(request)
        trainer.add_callback(stop)
        if book is not None:
            trainer.add_callback(AccountsCallback(book))
        trainer.train(resume_from_checkpoint=str(resume.checkpoint) if resume else None)
        complete = trainer.state.global_step >= trainer.args.max_steps
        if complete:
            _save_result(trainer, output_dir)
        if book is not None:
            accounts = book.write(trainer.state.num_input_tokens_seen)
            logger.info("accounts: %s", describe_accounts(accounts))
    return PretrainResult(
        output_dir=output_dir,
        step=trainer.state.global_step,
        max_steps=trainer.args.max_steps,
        log_history=trainer.state.log_history,
        checkpoint=list_checkpoints(output_dir)[-1],
        stopped_by=None if complete else stop.stopped_by,
    )


def _save_result(trainer: PretrainTrainer, output_dir: Path) -> None:
    """Put model, tokenizer, log and loss curve into the run's folder, each file whole, the weights last."""
    model = cast(FAT5ForConditionalGeneration, trainer.model)
    sharded = isinstance(trainer, ShardedTrainer)
    weights = whole_weights(model, keep=trainer.args.should_save) if sharded else None
    if not trainer.args.should_save:
        return
    staging = output_dir / STAGING / "model"
    try:
        with library_bars_hidden():
            model.save_pretrained(staging, state_dict=weights)
            cast(Any, trainer.processing_class).save_pretrained(staging)
        files = sorted(staging.iterdir(), key=lambda path: (path.suffix == ".safetensors", path.name))
        for file in files:
            file.replace(output_dir / file.name)
    except (OSError, SafetensorError) as error:
        last = list_checkpoints(output_dir)[-1]
        raise CheckpointError(f"the final model could not be saved ({error}); its weights are in {last}") from error
    finally:
        shutil.rmtree(output_dir / STAGING, ignore_errors=True)
    with atomic_file(output_dir / STATE_NAME) as path:
        trainer.state.save_to_json(str(path))
    plot_loss(trainer.state.log_history, output_dir / CURVE_NAME, title=output_dir.name)


def _already_complete(config: PretrainConfig, resume: ResumePoint, max_steps: int) -> PretrainResult:
    logger.warning(
        "%s is at step %s of %s: nothing to do. Raise training.max_steps or name another training.output_dir",
        resume.checkpoint,
        f"{resume.step:,}",
        f"{max_steps:,}",
    )
    history = read_log_history(resume.checkpoint / STATE_NAME)
    return PretrainResult(Path(config.training.output_dir), resume.step, max_steps, history, resume.checkpoint)
