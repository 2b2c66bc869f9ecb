"""What a task is: how rows become batches, a batch a loss, outputs predictions, and predictions scores."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from fat5.data.table_files import Row
from fat5.errors import CheckpointError
from fat5.tasks.columns import Field

Feature = dict[str, Any]
Scores = dict[str, float]
Batch = dict[str, Tensor]
IGNORE_INDEX = -100


@dataclass(frozen=True)
class Head:
    """What a model is loaded as.

    Attributes:
        auto_class: Name of the Auto class of Transformers, also for FAT5 where `fat5_class` is None.
        fat5_class: Name of the class in `fat5.models`.
        parts: Names that the head's modules have in models of Transformers.
    """

    auto_class: str
    fat5_class: str | None = None
    parts: tuple[str, ...] = ()


class Task(ABC):
    """A task, with its options.

    Args:
        options: An instance of the class's `Options`.

    Attributes:
        name: In the registry.
        fields: What it reads from a row.
        head: What the model is loaded as.
        metrics: The scores that may lead, the first that a result holds decides: best model, sweeps, tables.
        labels: Names of the classes, in the order of the model's outputs; None where there are none.
    """

    name: ClassVar[str]
    fields: ClassVar[tuple[Field, ...]]
    head: ClassVar[Head]
    metrics: ClassVar[tuple[str, ...]]
    Options: ClassVar[type]

    def __init__(self, options: Any) -> None:
        self.options = options
        self.labels: list[str] | None = None

    def learn_labels(self, rows: Sequence[Row]) -> None:
        """Take the names of the classes from the training rows; a task without classes has none."""
        self.labels = None

    def adopt_labels(self, config: Any, rows: Sequence[Row]) -> None:
        """Take the names of the classes from a finetuned model's configuration; `rows` are those to be judged on."""
        self.labels = None

    def unseen_labels(self, rows: Sequence[Row]) -> list[str]:
        """Return the classes of `rows` that the model does not know; it can only be wrong there."""
        return []

    @abstractmethod
    def encode(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[Feature]:
        """Return features to train on, lists of ids by the model's argument names; a row may become several."""

    @abstractmethod
    def predict(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], inference: Inference
    ) -> list[Any]:
        """Return a prediction for each row, in their order, in the form that `score` takes."""

    @abstractmethod
    def score(self, rows: Sequence[Row], predictions: Sequence[Any]) -> Scores:
        """Return the scores of predictions by name, in percent."""

    @abstractmethod
    def baselines(self, train: Sequence[Row], rows: Sequence[Row]) -> dict[str, list[Any]]:
        """Return the predictions of simple methods by name; those that learn learn from `train`."""

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Return the loss of a training batch, a scalar."""
        return model(**batch).loss

    def collate(self, features: Sequence[Feature], tokenizer: PreTrainedTokenizerBase) -> Batch:
        """Return padded tensors; what is no list of ids is stacked."""
        return pad_features(features, tokenizer)

    def leading(self, scores: Mapping[str, float]) -> str:
        """Return the name of the score that decides."""
        return next(name for name in self.metrics if name in scores)


@dataclass(frozen=True)
class Inference:
    """How predictions are made.

    Attributes:
        batch_size: Rows a batch.
        device: Where the model is.
        bf16: Whether to compute in bf16 around fp32 weights.
        progress: Whether to draw a progress bar on a terminal.
    """

    batch_size: int
    device: torch.device
    bf16: bool = False
    progress: bool = True

    def autocast(self) -> Any:
        """Return the context of the model's arithmetic."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    def map(
        self,
        features: Sequence[Feature],
        collate: Callable[[Sequence[Feature]], Batch],
        run: Callable[[Batch], Iterable[Any]],
    ) -> list[Any]:
        """Run batches of features of like length, without gradients, and return an item for each, in their order.

        Args:
            features: With `input_ids`.
            collate: Features to a batch.
            run: A batch on the device to as many items as it has features.
        """
        order = sorted(range(len(features)), key=lambda index: -len(features[index]["input_ids"]))
        results: list[Any] = [None] * len(features)
        with torch.inference_mode(), self.autocast():
            for chosen in self._batches(order):
                batch = collate([features[index] for index in chosen])
                batch = {name: value.to(self.device) for name, value in batch.items()}
                for index, item in zip(chosen, run(batch), strict=True):
                    results[index] = item
        return results

    def _batches(self, order: list[int]) -> Iterator[list[int]]:
        starts = range(0, len(order), self.batch_size)
        hidden = None if self.progress else True  # None: where there is no terminal
        for start in tqdm(starts, "evaluating", leave=False, dynamic_ncols=True, disable=hidden):
            yield order[start : start + self.batch_size]


def pad_features(features: Sequence[Feature], tokenizer: PreTrainedTokenizerBase) -> Batch:
    """Return [B, L] tensors of the features' lists, padded as each needs it, and [B] of their numbers."""
    fill = {"input_ids": tokenizer.pad_token_id, "attention_mask": 0, "token_type_ids": 0}
    batch = {}
    for name, first in features[0].items():
        values = [feature[name] for feature in features]
        if isinstance(first, list):
            length = max(map(len, values))
            padding = fill.get(name, IGNORE_INDEX)
            values = [value + [padding] * (length - len(value)) for value in values]
        batch[name] = torch.tensor(values)
    return batch


def input_names(model: Any) -> list[str]:
    """Return those of a tokenizer's outputs that the model's forward takes."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    taken = inspect.signature(base.forward).parameters
    return [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in taken]


def class_names(config: Any, task: str, present: Sequence[str]) -> list[str]:
    """Return the classes of a finetuned model in the order of its outputs.

    A model that only numbers them, LABEL_0 and so on, is taken to mean the numbers of the data.

    Raises:
        CheckpointError: The model's classes and those of the data have none in common.
    """
    labels = [config.id2label[index] for index in range(config.num_labels)]
    if all(label == f"LABEL_{index}" for index, label in enumerate(labels)):
        labels = [str(index) for index in range(len(labels))]
    if not set(labels) & set(present):
        raise CheckpointError(
            f"the model's classes are {_some(labels)}, those of the data {_some(present)}: it was not finetuned for "
            f"this {task}"
        )
    return labels


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
