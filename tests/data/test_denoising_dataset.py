"""The stream of batches: one and the same for any number of workers, split over ranks, resumed anywhere."""

from __future__ import annotations

import hashlib
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from fat5.data.denoising_config import DenoisingConfig
from fat5.data.denoising_dataset import DenoisingDataset
from fat5.data.token_dataset import TokenDataset
from fat5.errors import ConfigError, DataError
from tests.data import denoising_reference as reference

CONFIG = DenoisingConfig(max_input_length=64, max_target_length=64, encoder_budget=512, look_ahead=32)
LENGTHS = [0, 1, 2, 700, *(2 + 37 * number % 117 for number in range(200))]
TOKENS = TokenDataset.from_lists([list(range(300, 300 + length)) for length in LENGTHS], vocab_size=4096)


def dataset(config: DenoisingConfig = CONFIG, tokens: TokenDataset = TOKENS, **options) -> DenoisingDataset:
    return DenoisingDataset(tokens, reference.special_tokens(), config, **{"epochs": 1, **options})


def content(batch: dict) -> tuple:
    return tuple(
        (name, tuple(value.flatten().tolist()) if isinstance(value, torch.Tensor) else value)
        for name, value in sorted(batch.items())
    )


def contents(batches) -> list[tuple]:
    return [content(batch) for batch in batches]


def loaded(source: DenoisingDataset, num_workers: int) -> list[tuple]:
    return contents(DataLoader(source, batch_size=None, num_workers=num_workers))


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_stream_is_the_same_for_any_number_of_workers(layout):
    """Pitfall: workers draw identical numbers, or the stream hangs on how many there are."""
    config = CONFIG if layout == "packed" else DenoisingConfig(layout="padded", max_input_length=64, batch_size=8)
    alone = contents(dataset(config))
    assert len(alone) > 12
    assert len(set(alone)) == len(alone)
    for num_workers in (0, 1, 4):
        assert loaded(dataset(config), num_workers) == alone


def test_epochs_differ_in_order_denoisers_and_spans():
    """Pitfall: each epoch the same."""
    whole = contents(dataset(epochs=2))
    first = contents(dataset(epochs=1))
    assert len(whole) >= 2 * len(first) - 1
    assert not set(first) & set(whole[len(first) :])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resumed_stream_goes_on_exactly(num_workers):
    """Pitfall: after a resume inside an epoch the data starts over."""
    whole = contents(dataset(epochs=2))
    for start in (1, 9, len(whole) - 2, len(whole), len(whole) + 3):
        resumed = dataset(epochs=2, start_batch=start)
        assert loaded(resumed, num_workers) == whole[start:]
        assert len(resumed) == len(whole[start:])


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_stream_of_one(world_size):
    whole = contents(dataset(epochs=2))
    for rank in range(world_size):
        expected = whole[rank::world_size]
        options = {"epochs": 2, "rank": rank, "world_size": world_size}
        assert loaded(dataset(**options), 2) == expected
        assert len(dataset(**options)) == len(expected)
        assert loaded(dataset(**options, start_batch=3), 2) == expected[3:]


def test_endless_stream_has_no_length_and_passes_the_epochs_end():
    endless = dataset(epochs=None)
    with pytest.raises(TypeError, match="without a number of epochs has no length"):
        len(endless)
    one_epoch = len(dataset())
    stream = iter(endless)
    batches = [content(next(stream)) for _ in range(3 * one_epoch)]
    assert len(set(batches)) == len(batches)


def test_evaluation_sees_every_window_once_in_one_order():
    evaluation = dataset(shuffle=False)
    batches = list(evaluation)
    assert contents(batches) == contents(evaluation)
    restored = []
    for batch in batches:
        for example in reference.examples(batch):
            text = reference.reconstruct(
                example.source, example.target, evaluation.denoisers[example.denoiser], reference.special_tokens()
            )
            restored.append(len(text))
    statistics = evaluation.statistics()
    assert sum(restored) + statistics.skipped_tokens == sum(LENGTHS)
    assert len(restored) == statistics.windows
    assert {batch["input_ids"].shape for batch in batches} == {(512,)}


def test_statistics_come_from_the_plan_whoever_reads_it():
    """Pitfall: documents dropped without a word."""
    source = dataset()
    batches = list(source)
    total = source.statistics()
    assert total.batches == len(batches)
    assert total.documents == len(LENGTHS)
    assert total.input_tokens == sum(batch["num_input_tokens"] for batch in batches)
    assert total.target_tokens == sum(batch["num_target_tokens"] for batch in batches)
    assert total.encoder_fill == pytest.approx(total.input_tokens / (512 * len(batches)))
    assert total.decoder_fill == pytest.approx(total.target_tokens / (source.budgets.decoder_budget * len(batches)))
    assert total.skipped["documents of fewer than 2 tokens"] == 2
    assert sum(total.denoiser_windows.values()) == total.windows
    ids = torch.cat([batch["denoiser_ids"] for batch in batches])
    counted = {denoiser.name: int((ids == index).sum()) for index, denoiser in enumerate(source.denoisers)}
    assert total.denoiser_windows == counted
    part = source.statistics(5)
    assert part.input_tokens == sum(batch["num_input_tokens"] for batch in batches[:5])
    assert source.statistics(7).batches == 7
    half = dataset(world_size=2, rank=1, epochs=None).statistics(3)
    assert half.batches == 6
    with pytest.raises(ConfigError, match="stream without end need a number of batches"):
        dataset(epochs=None).statistics()


def test_copy_for_a_spawned_worker_gives_the_same_stream():
    source = dataset()
    source.statistics(3)
    assert contents(pickle.loads(pickle.dumps(source))) == contents(source)


def test_shapes_of_training_serve_for_evaluation():
    training = dataset().budgets
    config = DenoisingConfig(
        max_input_length=64,
        max_target_length=64,
        encoder_budget=512,
        decoder_budget=training.decoder_budget,
        max_documents=training.max_documents,
    )
    short = TokenDataset.from_lists([[300, 301, 302]] * 9, vocab_size=4096)
    (batch,) = dataset(config, short, shuffle=False)
    expected = next(iter(dataset()))
    assert {name: value.shape for name, value in batch.items() if isinstance(value, torch.Tensor)} == {
        name: value.shape for name, value in expected.items() if isinstance(value, torch.Tensor)
    }


def test_stream_is_the_recorded_one():
    """A change of this digest means that runs begun before the change cannot be resumed exactly after it."""
    digest = hashlib.sha256()
    for name in ("input_ids", "labels", "cu_seqlens", "denoiser_ids"):
        for batch in dataset():
            digest.update(np.array(batch[name].tolist(), dtype="<i8").tobytes())
    assert digest.hexdigest() == "a358ed578a62a974c92d028df6cbfe020215777ac65789d7fc0b94cfa1c5ffa2"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rank": 2, "world_size": 2}, ConfigError, "rank 2 of 2"),
        ({"epochs": 0}, ConfigError, "epochs must be 1 or more"),
        ({"start_batch": -1}, ConfigError, "start_batch must be 0 or more"),
        (
            {"tokens": TokenDataset.from_lists([[], [5]], vocab_size=9)},
            DataError,
            "none of the 2 documents has 2 tokens",
        ),
        ({"tokens": TokenDataset.from_lists([], vocab_size=9)}, DataError, "none of the 0 documents"),
    ],
)
def test_wrong_arguments_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        dataset(**options)
