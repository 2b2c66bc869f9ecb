"""Training that starts from a T5, FLAN-T5 or FAT5 checkpoint, and keeps all the digits of its weights."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from fat5.data.hub import local_files_only
from fat5.errors import CheckpointError, ConfigError, nearest_path
from fat5.models import FAT5Config, FAT5ForConditionalGeneration
from fat5.optim import is_sharded
from fat5.training.model_config import ModelConfig

# What a run may choose without another shape or meaning of the weights.
_FREE = ("dropout_rate", "z_loss", "label_smoothing", "attention_backend", "kernel_backend")
_FAULTS = ("missing", "unexpected", "mismatched")
_SPECIAL_IDS = ("pad_token_id", "eos_token_id", "decoder_start_token_id")


def load_initial_model(
    source: str, settings: ModelConfig, wanted: FAT5Config, tokenizer_length: int
) -> FAT5ForConditionalGeneration:
    """Return the model of a checkpoint in float32, with the run's own dropout, z-loss, smoothing and backends.

    Args:
        source: Folder or hub name of the checkpoint.
        settings: `model` of the run: what is set there beside those five must be the checkpoint's.
        wanted: The same, built for the run's tokenizer.
        tokenizer_length: Ids of the run's tokenizer.

    Raises:
        ConfigError: A setting or the tokenizer is not the checkpoint's.
        CheckpointError: There is no such checkpoint, or weights are missing, left over or of another shape.
    """
    own: dict[str, Any] = {name: getattr(wanted, name) for name in _FREE}
    try:
        loaded: Any = FAT5ForConditionalGeneration.from_pretrained(
            source,
            output_loading_info=True,
            dtype=torch.float32,
            local_files_only=local_files_only(source),
            **own,
        )
    except OSError as error:
        meant = "" if Path(source).is_dir() else nearest_path(source, folder=True)
        raise CheckpointError(f"training.init_from is {source!r}{meant}: {' '.join(str(error).split())}") from error
    model, report = loaded
    faults = [f"{kind} {min(map(str, names))}" for kind in _FAULTS if (names := report[f"{kind}_keys"])]
    if faults:
        raise CheckpointError(f"the weights of {source} do not fit the model: {', '.join(faults)}")
    _check(source, model.config, settings, wanted, tokenizer_length)
    return model


def keep_rounding_errors(weights: dict[str, Tensor], model: FAT5ForConditionalGeneration, optimizer: Optimizer) -> None:
    """Put what rounding took from float32 weights into the Kahan compensation of `AdamWScale`.

    A bf16 weight and its bf16 compensation together hold about 16 bits, so that a checkpoint in float32 is trained on
    from where it stands and not from its rounded copy. Parameters that the optimiser does not compensate are left.

    Args:
        weights: The weights before the model was rounded, by name.
        model: The rounded model, sharded or not.
        optimizer: Its optimiser, before the first step.
    """
    kahan = {id(parameter) for group in optimizer.param_groups if group.get("kahan") for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if id(parameter) in kahan and parameter.dtype in (torch.bfloat16, torch.float16):
            exact = weights[name].detach().to(parameter.device)
            lost = (exact - exact.to(parameter.dtype)).to(parameter.dtype)
            if is_sharded(parameter):
                from fat5.optim.sharded import shard_like

                lost = shard_like(lost, parameter)  # type: ignore[arg-type]
            optimizer.state[parameter]["compensation"] = lost


def _check(source: str, found: FAT5Config, settings: ModelConfig, wanted: FAT5Config, tokenizer_length: int) -> None:
    different = []
    for field in fields(cast(Any, settings)):
        value: Any = getattr(settings, field.name)
        # A default is no wish: the checkpoint decides.
        if field.name not in _FREE and value != field.default and value != getattr(found, field.name):
            different.append(f"model.{field.name} is {value!r}, the checkpoint's {getattr(found, field.name)!r}")
    if different:
        raise ConfigError(
            f"training.init_from is {source}, with which the model's settings do not agree: {'; '.join(different)}. "
            "Leave them out to take the checkpoint's"
        )
    if found.vocab_size < tokenizer_length:
        raise ConfigError(
            f"{source} has {found.vocab_size} embeddings, the tokenizer {tokenizer_length} tokens; expected the "
            "checkpoint's own tokenizer in data.tokenizer"
        )
    for name in _SPECIAL_IDS:
        if getattr(found, name) != getattr(wanted, name):
            raise ConfigError(
                f"{source} has {name}={getattr(found, name)}, the tokenizer {getattr(wanted, name)}; expected the "
                "checkpoint's own tokenizer in data.tokenizer"
            )
