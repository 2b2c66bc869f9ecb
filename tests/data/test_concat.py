"""The layout `concat`: rows of fixed length cut from the documents end to end."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from fat5.data.denoisers import Denoiser
from fat5.data.denoising_config import DenoisingConfig
from fat5.data.denoising_dataset import DenoisingDataset
from fat5.data.token_dataset import TokenDataset
from fat5.errors import ConfigError
from tests.data import denoising_reference as reference
from tests.data.test_collator import Shards

CONFIG = DenoisingConfig(layout="concat", max_input_length=64, max_target_length=40, batch_size=4, seed=5)
LENGTHS = [0, 1, 2, 700, 1, *(37 * number % 117 for number in range(60)), 1]
TEXTS = [(300 + np.arange(length) + 131 * number).tolist() for number, length in enumerate(LENGTHS)]
TEXTS = [[300 + token % 8000 for token in text] for text in TEXTS]
SOURCE = TokenDataset.from_lists(TEXTS, vocab_size=16_384)


def dataset(config: DenoisingConfig = CONFIG, source=SOURCE, **options) -> DenoisingDataset:
    return DenoisingDataset(source, reference.special_tokens(), config, **{"epochs": 1, **options})


def rows_of(source: DenoisingDataset) -> list[tuple[int, list[int]]]:
    """Denoiser and text of every row, put together again from its two sides."""
    examples = [example for batch in source for example in reference.examples(batch)]
    return [
        (
            example.denoiser,
            reference.reconstruct(
                example.source, example.target, source.denoisers[example.denoiser], reference.special_tokens()
            ),
        )
        for example in examples
    ]


def test_rows_in_order_are_the_documents_end_to_end():
    """Pitfall: tokens dropped without a word; documents of one token are part of a row here."""
    rows = rows_of(dataset(shuffle=False))
    assert list(itertools.chain(*(text for _, text in rows))) == list(itertools.chain(*TEXTS))
    statistics = dataset(shuffle=False).statistics()
    assert (statistics.skipped_tokens, statistics.windows) == (0, len(rows))
    assert statistics.text_tokens == sum(LENGTHS)
    assert statistics.documents == len(LENGTHS)


def test_each_row_is_the_longest_of_its_denoiser_and_fills_a_limit():
    source = dataset(shuffle=False)
    rows = rows_of(source)
    for denoiser, text in rows[:-1]:
        fits, next_fits = (
            all(
                side <= limit
                for side, limit in zip(
                    reference.side_lengths(length, source.denoisers[denoiser], 256), (64, 40), strict=True
                )
            )
            for length in (len(text), len(text) + 1)
        )
        assert fits
        assert not next_fits
    assert len({denoiser for denoiser, _ in rows}) == 7
    batches = list(source)
    assert {tuple(batch["input_ids"].shape) for batch in batches[:-1]} == {(4, 64)}
    assert {tuple(batch["labels"].shape) for batch in batches[:-1]} == {(4, 40)}


def test_shuffled_rows_hold_each_document_once_an_epoch_in_a_new_order():
    single = replace(CONFIG, denoisers=[Denoiser()])
    texts = [[1000 * number + place for place in range(9)] for number in range(1, 31)]
    source = TokenDataset.from_lists(texts, vocab_size=65_536)
    stream = list(itertools.chain(*(text for _, text in rows_of(dataset(single, source, epochs=2)))))
    epochs = [
        [tuple(piece) for piece in np.array(part).reshape(-1, 9).tolist()] for part in (stream[:270], stream[270:])
    ]
    assert [sorted(epoch) for epoch in epochs] == [[tuple(text) for text in texts]] * 2
    assert epochs[0] != epochs[1]
    assert epochs[0] != sorted(epochs[0])


def test_rows_of_several_files_are_those_of_one():
    parts = [TokenDataset.from_lists(part, vocab_size=16_384) for part in (TEXTS[:3], TEXTS[3:4], TEXTS[4:])]
    assert rows_of(dataset(source=Shards(*parts), epochs=2)) == rows_of(dataset(epochs=2))


def test_last_token_alone_is_skipped_and_counted():
    config = replace(CONFIG, denoisers=[Denoiser()])
    longest = len(rows_of(dataset(config, shuffle=False))[0][1])
    source = TokenDataset.from_lists([[300] * longest, [301] * (longest + 1)], vocab_size=16_384)
    statistics = dataset(config, source).statistics()
    assert (statistics.windows, statistics.skipped_tokens) == (2, 1)
    assert statistics.skipped["last tokens of a document, left alone by its windows"] == 1


def test_settings_of_other_layouts_are_refused():
    for name, value in {"encoder_budget": 4096, "pad_to": "longest", "look_ahead": 3}.items():
        with pytest.raises(ConfigError, match=rf"{name} belongs to layout 'pa.*, but layout is 'concat'.*batch_size"):
            DenoisingConfig(layout="concat", **{name: value})
