"""Pretokenisation that goes on after a kill, to the bytes of a run that was never interrupted."""

from __future__ import annotations

import itertools
import json
import logging
import random
import subprocess
import sys
import textwrap
import time

import pytest

from fat5.data import token_shards
from fat5.data.output_folder import resumable_folder
from fat5.data.pretokenize import PretokenizeConfig, pretokenize
from fat5.data.sample import sample_documents
from fat5.data.sources import TextSource
from fat5.data.token_dataset import TokenDataset
from fat5.data.tokenizer import load_tokenizer

from .small_tokenizer import small_tokenizer

SETTINGS = {"shard_tokens": 60_000, "validation_fraction": 0.1, "min_tokens": 30}


def content(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Two files of text, read in small batches, so that there are many token files."""
    monkeypatch.setattr("fat5.data.pretokenize._BATCH_BYTES", 50_000)
    texts = list(sample_documents())
    for name, part in (("a", texts[:700]), ("b", texts[700:1200])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    return tmp_path / "a.jsonl", tmp_path / "b.jsonl"


def run(corpus, output, **settings):
    config = PretokenizeConfig(**{**SETTINGS, **settings})
    return pretokenize(
        TextSource([str(path) for path in corpus]), small_tokenizer(), output, config, show_progress=False
    )


def interrupt(monkeypatch, corpus, output, after: int, **settings) -> list[str]:
    """Break a run off, as Ctrl+C does, before it writes token file number `after`; return the files written."""
    original, written = token_shards.write_shard, []

    def write(path, *arguments):
        if len(written) == after:
            raise KeyboardInterrupt
        written.append(path.name)
        return original(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr("fat5.data.pretokenize.write_shard", write)
        with pytest.raises(KeyboardInterrupt):
            run(corpus, output, **settings)
    assert not output.exists()
    return written


def count_writes(monkeypatch) -> list[str]:
    original, written = token_shards.write_shard, []

    def write(path, *arguments):
        written.append(path.name)
        return original(path, *arguments)

    monkeypatch.setattr("fat5.data.pretokenize.write_shard", write)
    return written


@pytest.mark.parametrize(("after", "fraction"), [(0, 0.1), (1, 0.1), (4, 0.1), (7, 0.1), (3, 0.0)])
def test_an_interrupted_run_goes_on_to_the_same_bytes(tmp_path, monkeypatch, corpus, after, fraction):
    run(corpus, tmp_path / "whole", validation_fraction=fraction)
    interrupt(monkeypatch, corpus, tmp_path / "out", after, validation_fraction=fraction)
    written = count_writes(monkeypatch)
    run(corpus, tmp_path / "out", validation_fraction=fraction)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    in_a_row = 2 if fraction else 1
    total = sum(len(TokenDataset(path.parent).flat_shards()) for path in (tmp_path / "out").rglob("manifest.json"))
    assert total > 7 // (3 - in_a_row)
    # Rows of files that were complete are kept; one that was half written is written again.
    assert len(written) == total - after // in_a_row * in_a_row
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", "out", "whole"]


def test_interrupted_more_than_once(tmp_path, monkeypatch, corpus):
    run(corpus, tmp_path / "whole")
    for after in (2, 4):
        interrupt(monkeypatch, corpus, tmp_path / "out", after)
    run(corpus, tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_killed_at_any_moment_the_output_is_that_of_one_run(tmp_path, corpus):
    source = [str(path) for path in corpus]
    small_tokenizer().save_pretrained(tmp_path / "tokenizer")
    script = f"""
        import fat5.data.pretokenize as module
        from fat5.data.sources import TextSource
        from fat5.data.tokenizer import load_tokenizer
        module._BATCH_BYTES = 50_000
        print("start", flush=True)
        config = module.PretokenizeConfig(**{SETTINGS!r})
        module.pretokenize(TextSource({source!r}), load_tokenizer({str(tmp_path / "tokenizer")!r}),
                           {str(tmp_path / "out")!r}, config, show_progress=False)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    process.stdout.readline()
    progress = tmp_path / ".out.unfinished" / "progress.json"
    deadline = time.monotonic() + 60
    while not progress.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(random.random() * 0.1)
    process.kill()
    process.wait()
    process.stdout.close()
    for output in ("out", "whole"):
        tokenizer = load_tokenizer(tmp_path / "tokenizer")
        pretokenize(
            TextSource(source), tokenizer, tmp_path / output, PretokenizeConfig(**SETTINGS), show_progress=False
        )
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("change", ["text", "settings", "token file", "progress", "shorter"])
def test_what_no_longer_fits_is_made_anew(tmp_path, monkeypatch, corpus, change, caplog):
    interrupt(monkeypatch, corpus, tmp_path / "out", 4)
    unfinished, settings = tmp_path / ".out.unfinished", {}
    if change == "text":
        corpus[0].write_text(corpus[0].read_text().replace('"text": "', '"text": "Donc ', 1))
    elif change == "shorter":
        for path in corpus:
            path.write_text("".join(path.read_text().splitlines(keepends=True)[:80]))
    elif change == "settings":
        settings = {"min_tokens": 10}
    elif change == "token file":
        path = unfinished / "train" / "tokens-00001.arrow"
        path.write_bytes(path.read_bytes()[:-500])
    else:
        (unfinished / "progress.json").write_text('{"key": ')
    with caplog.at_level(logging.WARNING):
        run(corpus, tmp_path / "out", **settings)
    assert ("the source has changed" in caplog.text) == (change in ("text", "shorter"))
    run(corpus, tmp_path / "whole", **settings)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert not unfinished.exists()


def test_documents_of_a_program_start_anew(tmp_path, monkeypatch):
    texts = list(itertools.islice(sample_documents(), 20))

    def broken():
        yield from texts
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pretokenize(broken(), small_tokenizer(), tmp_path / "out", show_progress=False)
    assert not list(tmp_path.iterdir())


def test_two_processes_never_write_one_output(tmp_path, corpus):
    with (
        resumable_folder(tmp_path / "out", overwrite=False, replaceable=()),
        pytest.raises(FileExistsError, match=r"another process is making .*out"),
    ):
        run(corpus, tmp_path / "out")
