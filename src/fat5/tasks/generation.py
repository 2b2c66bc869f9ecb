"""What the tasks that write text have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from fat5.data.table_files import Row
from fat5.errors import ConfigError
from fat5.tasks.encoding import EncoderOptions, encode_texts, unbatched, warn_of_cuts
from fat5.tasks.task import Batch, Feature, Head, Inference, Task


@dataclass(frozen=True)
class GenerationOptions(EncoderOptions):
    """Settings of the tasks that write text.

    Attributes:
        max_length: Tokens of a source, special ones included; longer ones are cut at the end, with a warning.
        prefix: Text in front of each source, such as "summarize: ".
        max_target_length: Tokens of a target in training, and of a text that is generated.
        num_beams: Beams of the search; 1 for greedy search.
        no_repeat_ngram_size: No run of so many tokens is generated twice; 0 allows all.
    """

    max_target_length: int = 128
    num_beams: int = 1
    no_repeat_ngram_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in {"max_target_length": 2, "num_beams": 1, "no_repeat_ngram_size": 0}.items():
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"options.{name} is {value}, expected at least {least}")


class GenerationTask(Task):
    """Base of the tasks from one text to another; `source` and `target` name their fields."""

    source: ClassVar[str]
    target: ClassVar[str]
    head = Head("AutoModelForSeq2SeqLM", "FAT5ForConditionalGeneration")
    Options = GenerationOptions

    def encode(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[Feature]:
        """Return the source's ids, and the target's as labels."""
        features = encode_texts([row[self.source] for row in rows], tokenizer, self.options)
        limit = self.options.max_target_length
        targets = tokenizer(text_target=[row[self.target] for row in rows], verbose=False)
        long = sum(len(ids) > limit for ids in targets["input_ids"])
        if long:
            warn_of_cuts(long, len(rows), "targets", "options.max_target_length", limit)
            targets = tokenizer(text_target=[row[self.target] for row in rows], truncation=True, max_length=limit)
        labels = [feature["input_ids"] for feature in unbatched(targets)]
        return [feature | {"labels": ids} for feature, ids in zip(features, labels, strict=True)]

    def predict(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], inference: Inference
    ) -> list[Any]:
        """Return the generated text of each row."""
        return inference.map(
            encode_texts([row[self.source] for row in rows], tokenizer, self.options),
            lambda features: self.collate(features, tokenizer),
            lambda batch: decode_ids(generate(model, batch, tokenizer, self.options), tokenizer),
        )


def generate(model: Any, batch: Batch, tokenizer: PreTrainedTokenizerBase, options: GenerationOptions) -> Tensor:
    """Return generated ids [B, L] for a batch of sources: every task that writes text generates here.

    Args:
        model: An encoder-decoder with `generate`.
        batch: `input_ids` and `attention_mask`.
        tokenizer: Names the ids that end and pad a text.
        options: Lengths and beams.
    """
    own = model.generation_config
    start = own.decoder_start_token_id
    settings = GenerationConfig(
        max_new_tokens=options.max_target_length,
        num_beams=options.num_beams,
        no_repeat_ngram_size=options.no_repeat_ngram_size,
        do_sample=False,
        decoder_start_token_id=start if start is not None else model.config.decoder_start_token_id,
        forced_bos_token_id=own.forced_bos_token_id,
        eos_token_id=own.eos_token_id if own.eos_token_id is not None else tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=own.bos_token_id,
    )
    return model.generate(**batch, generation_config=settings)


def decode_ids(ids: Tensor | Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return texts without special tokens; ids that are none, such as the -100 of padded labels, count as padding."""
    table = torch.as_tensor(ids)
    known = (table >= 0) & (table < len(tokenizer))
    kept = table.masked_fill(~known, tokenizer.pad_token_id)
    return [text.strip() for text in tokenizer.batch_decode(kept, skip_special_tokens=True)]
