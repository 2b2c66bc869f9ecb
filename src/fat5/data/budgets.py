"""Budgets that suit the data: how many decoder slots and windows go with a number of encoder slots."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fat5.data.denoisers import Denoiser
from fat5.data.denoising_config import DenoisingConfig
from fat5.data.packing import BatchPlan, Budgets, Planner
from fat5.data.spans import SpanTable

_SAMPLED_WINDOWS = 2**17
_UNLIMITED = 2**60
_DEFAULT_ROWS = 32
_DEFAULT_LOOK_AHEAD = 256
_WINDOWS_MARGIN = 2.0


def suggest_decoder_budget(
    denoisers: Sequence[Denoiser],
    lengths: np.ndarray,
    encoder_budget: int,
    *,
    max_input_length: int,
    max_target_length: int,
    num_sentinels: int,
    multiple_of: int = 64,
) -> int:
    """Return the decoder slots that the windows in `encoder_budget` encoder slots need on average.

    That is `encoder_budget * sum(target lengths) / sum(input lengths)` over the windows of up to 2^17 documents in a
    pseudo-random order, rounded up to `multiple_of`, and `max_target_length` at least. Budgets in any other proportion
    leave the larger one partly empty, whatever the packing.

    Args:
        denoisers: The mixture.
        lengths: Tokens of each document, int64 [documents].
        encoder_budget: Encoder slots of a batch.
        max_input_length: Most tokens of an input.
        max_target_length: Most tokens of a target.
        num_sentinels: Sentinels of the tokenizer, which cap the spans of a window.
        multiple_of: The result is a multiple of this.
    """
    sample = _sample_windows(denoisers, lengths, max_input_length, max_target_length, num_sentinels)
    return _decoder_budget(sample, encoder_budget, max_target_length, multiple_of)


def resolve_budgets(config: DenoisingConfig, lengths: np.ndarray, num_sentinels: int) -> Budgets:
    """Return the sizes of a batch under `config`, with every null replaced.

    `decoder_budget` and `max_documents` then hang on the documents' lengths, though not on their order or the seed. To
    evaluate in the shapes of training, write the training data's numbers into the configuration.
    """
    if config.layout != "packed":
        rows = config.batch_size or _DEFAULT_ROWS
        return Budgets(rows * config.max_input_length, rows * config.max_target_length, rows, look_ahead=0)
    encoder_budget = config.encoder_budget or _DEFAULT_ROWS * config.max_input_length
    decoder_budget, max_documents = config.decoder_budget, config.max_documents
    if decoder_budget is None or max_documents is None:
        sample = _sample_windows(
            config.mixture, lengths, config.max_input_length, config.max_target_length, num_sentinels
        )
        decoder_budget = decoder_budget or _decoder_budget(sample, encoder_budget, config.max_target_length, 64)
        expected = min(encoder_budget / sample.input_length.mean(), decoder_budget / sample.target_length.mean())
        max_documents = max_documents or 8 * math.ceil(_WINDOWS_MARGIN * expected / 8)
    look_ahead = _DEFAULT_LOOK_AHEAD if config.look_ahead is None else config.look_ahead
    return Budgets(encoder_budget, decoder_budget, max_documents, look_ahead)


def _sample_windows(
    denoisers: Sequence[Denoiser],
    lengths: np.ndarray,
    max_input_length: int,
    max_target_length: int,
    num_sentinels: int,
) -> BatchPlan:
    table = SpanTable.build(
        denoisers,
        max_input_length=max_input_length,
        max_target_length=max_target_length,
        num_sentinels=num_sentinels,
    )
    return next(
        iter(Planner(lengths, table, Budgets(_UNLIMITED, _UNLIMITED, _SAMPLED_WINDOWS, look_ahead=0), epochs=1))
    )


def _decoder_budget(sample: BatchPlan, encoder_budget: int, max_target_length: int, multiple_of: int) -> int:
    needed = encoder_budget * sample.target_length.sum() / sample.input_length.sum()
    return multiple_of * math.ceil(max(needed, max_target_length) / multiple_of)
