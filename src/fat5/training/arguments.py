"""From our settings to Transformers' TrainingArguments, and the number format that a device allows."""

from __future__ import annotations

import logging

import torch
from transformers import TrainingArguments

from fat5.errors import ConfigError
from fat5.training.config import TrainingConfig

logger = logging.getLogger(__name__)


def resolve_precision(precision: str, device: str) -> str:
    """Return `training.precision` with "auto" looked up: "bf16" on GPUs that have it, else "fp32".

    Args:
        precision: "auto", or what to return if the device can do it.
        device: "auto" for the GPU if there is one, or "cpu".

    Raises:
        ConfigError: A GPU older than Ampere is asked for bf16, which it only emulates.
    """
    on_gpu = device == "auto" and torch.cuda.is_available()
    bf16_gpu = on_gpu and torch.cuda.get_device_capability()[0] >= 8
    if precision == "auto":
        return "bf16" if bf16_gpu else "fp32"
    if on_gpu and not bf16_gpu and precision != "fp32":
        raise ConfigError(
            f"training.precision is {precision}, but {torch.cuda.get_device_name()} has no bf16 arithmetic; "
            "use fp32 or auto"
        )
    return precision


def training_arguments(config: TrainingConfig, *, evaluate: bool, precision: str) -> TrainingArguments:
    """Return the Trainer's arguments, with `max_steps` still to be set; opens the process group under torchrun.

    Args:
        config: Our settings.
        evaluate: Whether there is validation text.
        precision: What `resolve_precision` returned.
    """
    arguments = TrainingArguments(
        output_dir=config.output_dir,
        max_steps=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        max_grad_norm=config.max_grad_norm,
        bf16=precision == "bf16-mixed",
        use_cpu=config.device == "cpu" or not torch.cuda.is_available(),
        logging_steps=config.log_every,
        logging_first_step=True,
        # The filter waits for the GPU at every step, and hides a divergence.
        logging_nan_inf_filter=False,
        eval_strategy="steps" if evaluate else "no",
        eval_steps=config.eval_every,
        save_strategy="steps",
        save_steps=config.save_every,
        report_to=list(config.report_to) or "none",
        dataloader_num_workers=config.num_workers,
        seed=config.seed,
        # The data set goes to its place by itself; the Trainer would read all batches up to there.
        ignore_data_skip=True,
        ddp_find_unused_parameters=False,
        # The Trainer writes it into the model's configuration, where generation reads it.
        use_cache=True,
    )
    if arguments.n_gpu > 1:
        logger.warning(
            "%d GPUs are visible and one is used; `torchrun --nproc-per-node %d -m fat5 pretrain ...` uses all",
            arguments.n_gpu,
            arguments.n_gpu,
        )
        # Else the Trainer would split packed batches over them with DataParallel.
        arguments._n_gpu = 1
    return arguments
