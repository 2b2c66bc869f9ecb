"""Models and tokenizers for a task: FAT5's own, those of T5's family, and any of Transformers with the task's head."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

import fat5.models as fat5_models
from fat5.data.hub import local_files_only, may_be_on_hub
from fat5.data.tokenizer import load_tokenizer
from fat5.errors import CheckpointError, ConfigError, FAT5Error, nearest_path
from fat5.models import FAT5Config
from fat5.models.encoder_head import FAT5EncoderHead
from fat5.tasks.extras import require
from fat5.tasks.settings import LoraSettings, ModelSettings
from fat5.tasks.task import Task, input_names
from fat5.training.progress import library_bars_hidden

logger = logging.getLogger(__name__)

_T5_LINEAR_LAYERS = ["q", "k", "v", "o", "wi", "wi_0", "wi_1", "wo"]
_DROPOUTS = ("dropout_rate", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "classifier_dropout")
_FIRST_LAYERS = ("classifier.dense.weight", "classifier.weight", "qa_outputs.weight")
_T5_FAMILY = ("fat5", "t5", "mt5", "umt5")


def load_task_tokenizer(settings: ModelSettings) -> PreTrainedTokenizerBase:
    """Load the tokenizer that belongs to the model.

    Raises:
        ConfigError: No checkpoint is named, or the tokenizer has no padding token.
        DataError: It cannot be loaded.
        FileNotFoundError: There is no such folder.
    """
    if settings.checkpoint is None:
        raise ConfigError("no model is named: give its folder or hub name, model.checkpoint")
    tokenizer = load_tokenizer(settings.tokenizer or settings.checkpoint)
    if tokenizer.pad_token_id is None:
        raise ConfigError(f"the tokenizer of {settings.checkpoint} has no padding token, which batches need")
    return tokenizer


def load_task_model(
    task: Task, settings: ModelSettings, tokenizer: PreTrainedTokenizerBase, *, finetuned: bool = False
) -> tuple[Any, list[str]]:
    """Load a model with the task's head, in fp32, and tell the tokenizer which of its outputs the model takes.

    Args:
        task: Its labels become the configuration's.
        settings: The checkpoint.
        tokenizer: Must not have more tokens than the model.
        finetuned: The head must be in the checkpoint, and the configuration's labels are the task's to take.

    Returns:
        The model, and the names of the weights that the checkpoint lacked.

    Raises:
        CheckpointError: The checkpoint is of another kind, or lacks the head where `finetuned`.
    """
    name = str(settings.checkpoint)
    config = _config(name)
    if task.labels is not None and not finetuned:
        config.id2label = dict(enumerate(task.labels))
        config.label2id = {label: index for index, label in enumerate(task.labels)}
        config.problem_type = None
    if settings.dropout is not None and not finetuned:
        _set_dropout(config, settings.dropout)
    is_fat5 = isinstance(config, FAT5Config)
    named = task.head.fat5_class if is_fat5 else None
    cls: Any = getattr(fat5_models, named) if named else getattr(transformers, task.head.auto_class)
    if not is_fat5 and task.head.auto_class == "AutoModelForTextEncoding" and type(config) not in cls._model_mapping:
        cls = transformers.AutoModel
    with library_bars_hidden():
        if settings.from_scratch:
            model: Any = cls(config) if named else cls.from_config(config)
            missing: list[str] = []
        else:
            model, missing = _pretrained(cls, name, config, resize=not finetuned)
    if finetuned and missing:
        raise CheckpointError(
            f"{name} has no trained head for {task.name} (it lacks {', '.join(sorted(missing)[:3])}); finetune it "
            "first: `fat5 finetune`"
        )
    if isinstance(model, FAT5EncoderHead):
        _fit_new_head(model, missing)
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise CheckpointError(f"the tokenizer has {len(tokenizer)} tokens and {name} an embedding of {rows}")
    taken = input_names(model)
    tokenizer.model_input_names = [entry for entry in tokenizer.model_input_names if entry in taken]
    return model.float(), missing


def _config(name: str) -> Any:
    local = Path(name).is_dir()
    if local and not (Path(name) / "config.json").is_file():
        raise FileNotFoundError(f"{name} holds no model: it has no config.json")
    if not local and not may_be_on_hub(name):
        raise FileNotFoundError(f"there is no folder {name}{nearest_path(name, folder=True)}")
    try:
        return AutoConfig.from_pretrained(name, local_files_only=local_files_only(name))
    except FAT5Error:
        raise
    except Exception as error:
        meant = "" if local else nearest_path(name, folder=True)
        raise CheckpointError(
            f"{name!r} is no model folder{meant}, and none of that name could be loaded: {_first_line(error)}"
        ) from error


def _set_dropout(config: Any, dropout: float) -> None:
    names = [name for name in _DROPOUTS if hasattr(config, name)]
    if not names:
        raise ConfigError(f"model.dropout: the configuration of {config.model_type} has none of {', '.join(_DROPOUTS)}")
    for name in names:
        setattr(config, name, dropout)


@torch.no_grad()
def _fit_new_head(model: FAT5EncoderHead, missing: list[str]) -> None:
    """Scale the first layer of a new head to the encoder's states, so that its outputs have mean square 1.

    It is initialised for states of mean square 1. A pretraining leaves final norms with far smaller weights (0.14 after
    the quickstart's), and the states have the size of these: the head would start deaf, and training with it.
    """
    size = model.get_encoder().final_layer_norm.weight.float().pow(2).mean().sqrt()
    for name in _FIRST_LAYERS:
        if name in missing:
            model.get_parameter(name).div_(size.clamp_min(1e-3))


def _pretrained(cls: Any, name: str, config: Any, *, resize: bool) -> tuple[Any, list[str]]:
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its table of new weights; they are logged below
    try:
        model, info = cls.from_pretrained(
            name,
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=resize,
            local_files_only=local_files_only(name),
        )
    except FAT5Error:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{name} cannot be loaded as {cls.__name__}: {_first_line(error)}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    resized = [str(entry[0]) for entry in info.get("mismatched_keys", [])]
    missing = sorted({*info["missing_keys"], *resized})
    if missing and resize:
        logger.info("new weights, to be trained: %s", ", ".join(missing))
    return model, missing


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def add_adapters(model: Any, task: Task, settings: LoraSettings, new_weights: list[str]) -> Any:
    """Return the model inside PEFT, with adapters on its layers; the task's head is trained in full.

    Args:
        model: The model.
        task: Names the head.
        settings: The adapters.
        new_weights: Weights that the checkpoint lacked.

    Raises:
        ConfigError: PEFT is missing, or no layer has one of the names in `settings.targets`.
    """
    peft: Any = require("peft", "lora", "LoRA")
    heads = {weight.split(".")[0] for weight in new_weights} | set(task.head.parts)
    targets: Any = settings.targets
    if targets is None:
        targets = _T5_LINEAR_LAYERS if model.config.model_type in _T5_FAMILY else "all-linear"
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=2 * settings.rank if settings.alpha is None else settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=targets,
        modules_to_save=[head for head in sorted(heads) if hasattr(model, head)] or None,
        exclude_modules=[head for head in sorted(heads) if hasattr(model, head)] or None,
    )
    try:
        return peft.get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError(f"lora.targets: {_first_line(error)}") from error


def without_adapters(model: Any) -> Any:
    """Return the plain model, with the adapters merged into its weights where it has some."""
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
