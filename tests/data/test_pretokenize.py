"""Pretokenisation: nothing lost, nothing half written, the same for any number of processes."""

from __future__ import annotations

import errno
import json
import multiprocessing
import resource
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest

from fat5.data import token_shards
from fat5.data.pretokenize import PretokenizeConfig, pretokenize
from fat5.data.sample import sample_documents
from fat5.data.sources import TextSource
from fat5.data.special_tokens import special_token_texts
from fat5.data.token_dataset import TokenDataset
from fat5.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from fat5.errors import ConfigError, DataError

from .small_tokenizer import HARD_TEXTS, SPELLED, random_texts, small_tokenizer, unigram_tokenizer

SAMPLE = TextSource(["fat5:sample"])


def run(source, output, **settings):
    return pretokenize(source, small_tokenizer(), output, PretokenizeConfig(**settings), show_progress=False)


def texts_of(folder) -> list[str]:
    dataset = TokenDataset(folder)
    return small_tokenizer().batch_decode([dataset.tokens(i) for i in range(len(dataset))])


def content(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_document_is_kept_whole_and_in_order(tmp_path):
    documents = [*islice(sample_documents(), 50), *random_texts(50), SPELLED, *HARD_TEXTS[2:]]
    manifest = run(documents, tmp_path / "out")["train"]
    assert texts_of(tmp_path / "out") == documents
    assert manifest == TokenDataset(tmp_path / "out").manifest
    assert manifest.documents == len(documents)
    assert manifest.text_bytes == sum(len(text.encode()) for text in documents)
    assert manifest.tokens == TokenDataset(tmp_path / "out").lengths.sum()
    assert manifest.skipped == {}


def test_text_that_spells_special_tokens_stays_text(tmp_path):
    run([SPELLED, "".join(special_token_texts())], tmp_path / "out")
    (flat, _), *_ = TokenDataset(tmp_path / "out").flat_shards()
    assert flat.min() >= len(special_token_texts())
    assert texts_of(tmp_path / "out") == [SPELLED, "".join(special_token_texts())]


def test_documents_of_no_one_and_100000_tokens(tmp_path):
    documents = ["", "\u00a0\n", "1", "2" * 100_000]
    manifest = run(documents, tmp_path / "out")["train"]
    assert TokenDataset(tmp_path / "out").lengths.tolist() == [1, 100_000]
    assert manifest.skipped == {"empty": 2}


def test_short_documents_are_skipped_and_counted(tmp_path):
    documents = ["1" * length for length in range(6)]
    manifest = run(documents, tmp_path / "out", min_tokens=4)["train"]
    assert TokenDataset(tmp_path / "out").lengths.tolist() == [4, 5]
    assert manifest.skipped == {"empty": 1, "fewer than min_tokens": 3}
    assert manifest.documents + sum(manifest.skipped.values()) == len(documents)


def test_several_processes_write_the_same_bytes(tmp_path):
    """Splits, files and manifests included."""
    settings = {"validation_fraction": 0.1, "shard_tokens": 100_000, "min_tokens": 60}
    for num_proc in (1, 2):
        run(SAMPLE, tmp_path / str(num_proc), num_proc=num_proc, **settings)
    one, two = (content(tmp_path / str(num_proc)) for num_proc in (1, 2))
    assert one == two
    assert "train/tokens-00001.arrow" in one
    assert not multiprocessing.active_children()


def test_several_files_are_one_data_set(tmp_path):
    run(SAMPLE, tmp_path / "whole")
    run(SAMPLE, tmp_path / "parts", shard_tokens=1)
    whole, parts = TokenDataset(tmp_path / "whole"), TokenDataset(tmp_path / "parts")
    assert len(parts.flat_shards()) > 1 == len(whole.flat_shards())
    assert np.array_equal(parts.lengths, whole.lengths)
    for index in (0, len(parts.flat_shards()[0][1]) - 2, len(parts.flat_shards()[0][1]) - 1, len(parts) - 1):
        assert parts.tokens(index).tolist() == whole.tokens(index).tolist()
    joined = [np.concatenate([flat for flat, _ in data.flat_shards()]) for data in (whole, parts)]
    assert np.array_equal(*joined)


def test_the_validation_split_is_a_fixed_share_without_twins(tmp_path):
    documents = list(sample_documents())
    manifests = run([*documents, *documents[:300]], tmp_path / "out", validation_fraction=0.1)
    train, validation = texts_of(tmp_path / "out" / "train"), texts_of(tmp_path / "out" / "validation")
    assert len(train) + len(validation) == len(documents) + 300
    assert not set(train) & set(validation)
    assert 0.07 < len(validation) / len(documents) < 0.13
    assert [manifests[name].split for name in manifests] == ["train", "validation"]
    run(reversed(documents), tmp_path / "again", validation_fraction=0.1)
    assert set(texts_of(tmp_path / "again" / "validation")) == set(validation)


def test_the_manifest_tells_where_the_data_comes_from(tmp_path):
    source = TextSource(["fat5:sample"], max_bytes="20kB")
    run(source, tmp_path / "out", min_tokens=2)
    written = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert written["source"]["source"] == ["fat5:sample"]
    assert written["source"]["max_bytes"] == "20kB"
    assert written["settings"]["min_tokens"] == 2
    assert written["tokenizer_fingerprint"] == tokenizer_fingerprint(small_tokenizer())
    assert (written["vocab_size"], written["dtype"]) == (1024, "uint16")
    assert 20_000 <= written["text_bytes"] < 24_000
    TokenDataset(tmp_path / "out").check_tokenizer(load_tokenizer(tmp_path / "out" / "tokenizer"))


def test_nothing_is_written_over_without_being_asked(tmp_path):
    run(["un deux trois"], tmp_path / "out")
    with pytest.raises(FileExistsError, match="--overwrite"):
        run(["quatre"], tmp_path / "out")
    assert texts_of(tmp_path / "out") == ["un deux trois"]
    run(["quatre"], tmp_path / "out", overwrite=True)
    assert texts_of(tmp_path / "out") == ["quatre"]
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"also holds 'notes\.txt'"):
        run(["cinq"], tmp_path / "out", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.fixture
def small_files() -> Iterator[None]:
    """Let the operating system refuse every file beyond 300 kB, in the middle of its writing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_is_one_error_and_leaves_nothing(tmp_path, small_files):
    run(["avant"], tmp_path / "old")
    for name in ("new", "old"):
        with pytest.raises(OSError, match=rf"nothing was kept of .*{name}: .*File too large") as caught:
            run(SAMPLE, tmp_path / name, overwrite=True)
        assert caught.value.errno == errno.EFBIG
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert texts_of(tmp_path / "old") == ["avant"]


def test_a_disk_that_fills_up_after_some_files_is_one_error_and_leaves_nothing(tmp_path, monkeypatch):
    original, written = token_shards.write_shard, []

    def full_after_one(path, *arguments):
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path)
        return original(path, *arguments)

    monkeypatch.setattr("fat5.data.pretokenize.write_shard", full_after_one)
    with pytest.raises(OSError, match=r"nothing was kept of .*: .*No space left on device") as caught:
        run(SAMPLE, tmp_path / "out", shard_tokens=100_000)
    assert caught.value.errno == errno.ENOSPC
    assert written
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_damaged_source_leaves_nothing(tmp_path, num_proc):
    path = tmp_path / "a.txt"
    path.write_bytes((b"mot " * 250 + b"\n\n") * 2000 + b"\xe9\n")
    with pytest.raises(DataError, match="byte 0xe9 at offset 2,004,000"):
        run(TextSource([str(path)]), tmp_path / "out", num_proc=num_proc)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]
    assert not multiprocessing.active_children()


def test_a_process_that_dies_is_one_error(tmp_path, monkeypatch):
    # A tokenizer that no worker can build ends every worker at its start.
    monkeypatch.setattr(
        "fat5.data.pretokenize.backend_of", lambda tokenizer: type("Broken", (), {"to_str": lambda s: "{}"})()
    )
    with pytest.raises(DataError, match=r"ended abruptly.*fewer processes"):
        run(["un"], tmp_path / "out", num_proc=2)
    assert not list(tmp_path.iterdir())


def test_no_document_left_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"no document is left of 3 read; skipped: 1 empty, 2 fewer than min_tokens"):
        run(["un", "deux", ""], tmp_path / "out", min_tokens=50)
    with pytest.raises(DataError, match=r"no document is left for the validation split .*validation_fraction is 1e-09"):
        run(["un", "deux"], tmp_path / "out", validation_fraction=1e-9)
    assert not list(tmp_path.iterdir())
    (tmp_path / "lines.txt").write_text("un\ndeux\n" * 20)
    with pytest.raises(DataError, match=r"of 1 read;.*in \.txt files a blank line ends a document"):
        run(TextSource([str(tmp_path / "lines.txt")]), tmp_path / "out", validation_fraction=0.5)


def test_a_tokenizer_without_sentinels_is_refused_before_reading(tmp_path):
    def documents():
        raise AssertionError("read although the tokenizer cannot be used")
        yield ""

    with pytest.raises(DataError, match="has no sentinel"):
        pretokenize(documents(), unigram_tokenizer([]), tmp_path / "out", show_progress=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_proc": 0}, "num_proc must be at least 1, got 0"),
        ({"min_tokens": 0}, "min_tokens must be at least 1, got 0"),
        ({"shard_tokens": -5}, "shard_tokens must be at least 1, got -5"),
        ({"validation_fraction": 1.0}, r"validation_fraction must be in \[0, 1\), got 1.0"),
    ],
)
def test_settings_out_of_range_are_errors(settings, message):
    with pytest.raises(ConfigError, match=message):
        PretokenizeConfig(**settings)


def test_documents_that_are_no_text_are_errors(tmp_path):
    with pytest.raises(ConfigError, match=r"TextSource\(\['corpus\.txt'\]\)"):
        run("corpus.txt", tmp_path / "out")
    with pytest.raises(DataError, match=r"document 1: .* holds int, expected text"):
        run(["un", 2], tmp_path / "out")
