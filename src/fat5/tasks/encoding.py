"""Texts to ids, with the lengths checked and what is cut counted."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from fat5.errors import ConfigError
from fat5.tasks.task import Feature

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EncoderOptions:
    """Settings of the tasks that read whole texts.

    Attributes:
        max_length: Tokens of a text, special ones included; longer texts are cut at the end, with a warning.
        prefix: Text in front of each input.
    """

    max_length: int = 512
    prefix: str = ""

    def __post_init__(self) -> None:
        if self.max_length < 8:
            raise ConfigError(f"options.max_length is {self.max_length}, expected at least 8")


def encode_texts(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    options: EncoderOptions,
    pairs: Sequence[str] | None = None,
) -> list[Feature]:
    """Return the ids of texts, or of pairs of texts, cut to `options.max_length`; says how many were cut."""
    prefixed = [options.prefix + text for text in texts]
    encoded = tokenizer(prefixed, *([list(pairs)] if pairs is not None else []), verbose=False)
    long = sum(len(ids) > options.max_length for ids in encoded["input_ids"])
    if long:
        warn_of_cuts(long, len(texts), "texts", "options.max_length", options.max_length)
        encoded = tokenizer(
            prefixed,
            *([list(pairs)] if pairs is not None else []),
            truncation=True,
            max_length=options.max_length,
        )
    return unbatched(encoded)


def warn_of_cuts(count: int, total: int, what: str, setting: str, limit: int) -> None:
    """Log that inputs were cut: silence here is how a model comes to be judged on the halves of its texts."""
    logger.warning("%d of %d %s are longer than %s=%d tokens and were cut", count, total, what, setting, limit)


@contextmanager
def cuts_known() -> Iterator[None]:
    """Silence the warnings of what is cut, where the same rows are read once more."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def unbatched(encoded: Mapping[str, Any]) -> list[Feature]:
    """Return a dict a row of what the tokenizer returned for the model."""
    names = [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in encoded]
    return [dict(zip(names, values, strict=True)) for values in zip(*(encoded[name] for name in names), strict=True)]


def check_length(model: Any, longest: int, setting: str) -> None:
    """Refuse inputs longer than the model's table of positions, which would end in an index error on the device.

    Raises:
        ConfigError: `longest` exceeds what the model takes.
    """
    config = model.config
    table = getattr(config, "max_position_embeddings", None)
    if not isinstance(table, int) or table < 1:  # relative positions: any length
        return
    # RoBERTa's family counts positions from behind the padding's.
    offset = config.pad_token_id + 1 if config.model_type in ("roberta", "camembert", "xlm-roberta") else 0
    if longest > table - offset:
        raise ConfigError(f"{setting} is {longest}, but the model has positions for {table - offset} tokens; lower it")
