"""The implementations: FAT5's classifier, and Transformers' with the same body."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import T5Config, T5EncoderModel, T5ForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput

from benchmarks.heads.workload import NUM_LABELS, Texts, Workload
from benchmarks.registry import UsageError
from fat5 import FAT5Config, FAT5ForSequenceClassification

YARDSTICK, PLAIN = "transformers", "transformers-encoder"


class EncoderClassifier(nn.Module):
    """Transformers' T5 encoder with the head of FAT5's classifier: what leaving out the decoder alone gains.

    Its parameters have the names of FAT5's.
    """

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.transformer = T5EncoderModel(config)
        self.classifier = nn.ModuleDict(
            {"dense": nn.Linear(config.d_model, config.d_model), "out_proj": nn.Linear(config.d_model, NUM_LABELS)}
        )

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> SequenceClassifierOutput:
        """Pool by the mean of the real tokens, and classify."""
        states = self.transformer(input_ids, attention_mask=attention_mask).last_hidden_state
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        pooled = (states * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        logits = self.classifier["out_proj"](torch.tanh(self.classifier["dense"](pooled)))
        return SequenceClassifierOutput(loss=nn.functional.cross_entropy(logits.float(), labels), logits=logits)


@dataclass(frozen=True)
class Implementation:
    """One way to classify.

    Attributes:
        name: Its name in the tables.
        build: Makes the model in float32, with the weights that all implementations share as far as it has them.
        packed: It is given the texts side by side.
        compiled: `torch.compile` runs it.
    """

    name: str
    build: Callable[[Workload], nn.Module]
    packed: bool = False
    compiled: bool = False

    def inputs(self, texts: Texts, rows: int | None = None) -> dict[str, Any]:
        """Return what the model is called with."""
        return texts.packed_inputs(rows) if self.packed else texts.padded_inputs(rows)


def plain(workload: Workload) -> EncoderClassifier:
    """Return Transformers' encoder with a head, randomly initialised; equal in every call."""
    torch.manual_seed(0)
    config = T5Config(**workload.settings)
    model = EncoderClassifier(config)
    scale = config.d_model**-0.5
    for name, parameter in model.named_parameters():
        if "classifier" in name:
            nn.init.zeros_(parameter) if name.endswith("bias") else nn.init.normal_(parameter, std=scale)
    return model


def fat5(workload: Workload) -> FAT5ForSequenceClassification:
    """Return FAT5's classifier with the weights of `plain`."""
    model = FAT5ForSequenceClassification(FAT5Config(**workload.settings))
    model.load_state_dict(plain(workload).state_dict())
    return model


def transformers(workload: Workload) -> T5ForSequenceClassification:
    """Return Transformers' classifier, an encoder and a decoder, whose encoder has the weights of `plain`."""
    torch.manual_seed(1)
    model = T5ForSequenceClassification(T5Config(**workload.settings))
    model.transformer.encoder.load_state_dict(plain(workload).transformer.encoder.state_dict())
    model.transformer.shared.load_state_dict(plain(workload).transformer.shared.state_dict())
    return model


_ALL = (
    Implementation(YARDSTICK, transformers),
    Implementation("transformers-compiled", transformers, compiled=True),
    Implementation(PLAIN, plain),
    Implementation("fat5", fat5),
    Implementation("fat5-compiled", fat5, compiled=True),
    Implementation("fat5-packed", fat5, packed=True),
)
"""The yardstick comes first, so that the others' ratios to it are known at once."""


def choose(names: Sequence[str] | None, *, quick: bool) -> list[Implementation]:
    """Return the implementations of these names, in the order of the tables; without names all, quick those uncompiled.

    Raises:
        UsageError: There is no such implementation; the message names the nearest.
    """
    known = {implementation.name: implementation for implementation in _ALL}
    for name in names or ():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"no implementation {name!r}; expected some of {', '.join(known)}{hint}")
    return [x for x in _ALL if (x.name in names if names else not (quick and x.compiled))]


def in_float64(model: nn.Module) -> nn.Module:
    """Return a copy of the model that computes in float64."""
    return copy.deepcopy(model).double()
