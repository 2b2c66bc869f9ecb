"""Batches out of streamed text: the denoising of stored text, resumable to the bit."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import signal
from collections import deque
from dataclasses import replace
from itertools import islice
from threading import Timer

import numpy as np
import pytest
import torch

from fat5.data.budgets import resolve_budgets
from fat5.data.denoising_config import DenoisingConfig
from fat5.data.loader import data_loader
from fat5.data.sample import sample_documents
from fat5.data.streaming_dataset import StreamingDataset
from fat5.data.text_stream import StreamConfig, StreamSource
from fat5.errors import ConfigError, DataError
from tests.data import denoising_reference as reference
from tests.data.endless_run import digests
from tests.data.small_tokenizer import small_tokenizer, unigram_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

CONFIGS = {
    "packed": DenoisingConfig(
        max_input_length=256,
        max_target_length=256,
        encoder_budget=2048,
        decoder_budget=1536,
        max_documents=48,
        look_ahead=64,
        seed=2,
    ),
    "padded": DenoisingConfig(layout="padded", max_input_length=256, max_target_length=256, batch_size=8),
    "concat": DenoisingConfig(layout="concat", max_input_length=256, max_target_length=256, batch_size=8),
}
SAMPLE = StreamConfig([StreamSource(["fat5:sample"])], shuffle_buffer=100)


def dataset(layout: str = "packed", stream: StreamConfig = SAMPLE, **options) -> StreamingDataset:
    return StreamingDataset(stream, small_tokenizer(), CONFIGS[layout], **options)


def saved(state: dict) -> dict:
    """The state as it comes back from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("layout", CONFIGS)
def test_an_epoch_holds_every_documents_tokens(layout):
    """Pitfall: documents dropped without a word."""
    source = dataset(layout, StreamConfig([StreamSource(["fat5:sample"])], shuffle_buffer=1))
    tokens = [
        token for text in sample_documents() for token in small_tokenizer()(text, add_special_tokens=False).input_ids
    ]
    windows: list[list[int]] = []
    batches = iter(source)
    while sum(map(len, windows)) < 1.1 * len(tokens):
        for example in reference.examples(next(batches)):
            denoiser = source.denoisers[example.denoiser]
            windows.append(reference.reconstruct(example.source, example.target, denoiser, source.special_tokens))
    found = [token for window in windows for token in window]
    if layout == "concat":
        assert found[: len(tokens)] == tokens
    missing = torch.bincount(torch.tensor(tokens)) - torch.bincount(torch.tensor(found), minlength=1024)
    # The last token of a document, left alone by its windows, is skipped.
    assert missing.clamp_min(0).sum() <= 2
    if layout == "concat":
        lengths = torch.tensor([len(window) for window in windows])
        assert lengths.float().mean() > 250


@pytest.mark.parametrize("layout", CONFIGS)
def test_shapes_are_those_of_stored_text(layout):
    source = dataset(layout)
    batches = list(islice(iter(source), 12))
    shapes = [{name: value.shape for name, value in batch.items() if hasattr(value, "shape")} for batch in batches]
    assert shapes == [shapes[0]] * 12
    slots = batches[0]["input_ids"].numel() + batches[0]["labels"].numel()
    filled = [(batch["num_input_tokens"] + batch["num_target_tokens"]) / slots for batch in batches]
    assert sum(filled) / 12 > (0.9 if layout == "packed" else 0.2)


def test_sizes_left_to_the_data_come_from_the_first_documents():
    config = replace(CONFIGS["packed"], decoder_budget=None, max_documents=None)
    budgets = [StreamingDataset(SAMPLE, small_tokenizer(), config, rank=rank, world_size=2).budgets for rank in (0, 1)]
    assert budgets[0] == budgets[1]
    lengths = np.array([len(small_tokenizer()(t, add_special_tokens=False).input_ids) for t in sample_documents()])
    expected = resolve_budgets(config, lengths, 256)
    assert budgets[0].decoder_budget == pytest.approx(expected.decoder_budget, rel=0.1)
    assert budgets[0].max_documents == pytest.approx(expected.max_documents, rel=0.2)


@pytest.mark.parametrize(("layout", "num_workers"), [("packed", 0), ("packed", 3), ("padded", 2), ("concat", 2)])
def test_resumed_after_any_batch_the_stream_goes_on_to_the_bit(layout, num_workers):
    """Pitfall: after a resume in the middle of an epoch the data starts over."""
    source = dataset(layout, rank=1, world_size=2)
    whole = list(islice(digests(iter(data_loader(source, num_workers=num_workers))), 40))
    assert len(set(whole)) == 40
    for taken in (1, 7, 26):
        loader = data_loader(dataset(layout, rank=1, world_size=2), num_workers=num_workers)
        assert list(islice(digests(iter(loader)), taken)) == whole[:taken]
        resumed = data_loader(dataset(layout, rank=1, world_size=2), num_workers=num_workers)
        resumed.load_state_dict(saved(loader.state_dict()))
        assert list(islice(digests(iter(resumed)), 40 - taken)) == whole[taken:]


def test_a_state_taken_after_a_resume_serves_as_well():
    expected = list(islice(digests(iter(data_loader(dataset(), num_workers=2))), 40))
    state, got = None, []
    for count in (3, 9, 1, 20):
        loader = data_loader(dataset(), num_workers=2)
        if state is not None:
            loader.load_state_dict(state)
        got += list(islice(digests(iter(loader)), count))
        state = saved(loader.state_dict())
    got += list(islice(digests(iter(loader)), 7))
    assert got == expected


def test_readers_are_numbered_over_ranks_and_workers():
    """One worker is none, and two ranks of two workers read the shares of four readers."""
    one = list(islice(digests(iter(data_loader(dataset()))), 6))
    assert list(islice(digests(iter(data_loader(dataset(), num_workers=1))), 6)) == one
    streams = {
        rank: list(islice(digests(iter(data_loader(dataset(rank=rank, world_size=2), num_workers=2))), 8))
        for rank in (0, 1)
    }
    assert len({*streams[0], *streams[1]}) == 16
    for rank, stream in streams.items():
        alone = [list(islice(digests(dataset(rank=rank, world_size=2).reader(worker, 2)), 4)) for worker in (0, 1)]
        assert stream == [digest for pair in zip(*alone, strict=True) for digest in pair]


def test_a_state_of_other_settings_is_refused():
    state = data_loader(dataset(), num_workers=2).state_dict()
    others = [
        (data_loader(dataset(), num_workers=3), "number of data workers was 2, now 3"),
        (data_loader(dataset(rank=1, world_size=2), num_workers=2), "this rank was 0, now 1"),
        (data_loader(dataset("padded"), num_workers=2), "denoising settings was"),
        (data_loader(dataset(stream=StreamConfig(SAMPLE.sources, 99)), num_workers=2), "fingerprint of sources"),
    ]
    for loader, message in others:
        with pytest.raises(ConfigError, match=message):
            loader.load_state_dict(state)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_damaged_source_is_one_error_that_names_the_place(tmp_path, num_workers):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "un deux trois quatre"}\n' * 3000 + "{\n")
    source = dataset(stream=StreamConfig([StreamSource([str(path)])], shuffle_buffer=10))
    with pytest.raises(DataError, match=r"^\S*a\.jsonl, line 3,001: no JSON object: [^\n]*$"):
        list(islice(iter(data_loader(source, num_workers=num_workers)), 1000))


def test_a_killed_worker_is_one_clear_error():
    batches = iter(data_loader(dataset(), num_workers=2))
    next(batches)
    # From another thread, so that the reading is under way.
    Timer(0.3, os.kill, (multiprocessing.active_children()[0].pid, signal.SIGKILL)).start()
    with pytest.raises(DataError, match=r"ended abruptly, .*use fewer workers"):
        deque(batches, maxlen=0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_skipped_documents_are_counted_by_reason_also_over_a_resume(tmp_path, num_workers):
    path = tmp_path / "a.jsonl"
    texts = ["un deux trois quatre", " ", "a", "un deux trois quatre cinq six"] * 600
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    stream = StreamConfig([StreamSource([str(path)])], shuffle_buffer=10)
    one, other = (data_loader(dataset(stream=stream), num_workers=num_workers) for _ in range(2))
    assert one.statistics().documents == 0
    deque(islice(iter(one), 11), maxlen=0)
    deque(islice(iter(other), 4), maxlen=0)
    resumed = data_loader(dataset(stream=stream), num_workers=num_workers)
    resumed.load_state_dict(saved(other.state_dict()))
    assert resumed.statistics() == other.statistics()
    deque(islice(iter(resumed), 7), maxlen=0)
    found = resumed.statistics()
    assert found == one.statistics()
    assert (resumed.batches, one.batches) == (11, 11)
    quarter = found.documents / 3
    assert found.skipped["empty"] == pytest.approx(quarter, rel=0.1)
    assert found.skipped["documents of fewer than 2 tokens"] == found.skipped_tokens == pytest.approx(quarter, rel=0.1)
    assert found.text_tokens > 10 * found.skipped_tokens


def test_what_cannot_work_is_refused_at_once():
    with pytest.raises(DataError, match="has no denoiser prefix"):
        StreamingDataset(SAMPLE, unigram_tokenizer(["<extra_id_0>"]), CONFIGS["packed"])
    with pytest.raises(FileNotFoundError, match=r"corpus\.jsonl does not exist"):
        dataset(stream=StreamConfig([StreamSource(["corpus.jsonl"])]))
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        dataset(rank=2, world_size=2)
