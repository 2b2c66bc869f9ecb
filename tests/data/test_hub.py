"""Data sets by their names on the hub: which names are asked of it, and what happens without a network."""

from __future__ import annotations

import json
import socket
import time

import datasets
import pytest

from fat5.data import hub
from fat5.data.hub import may_be_on_hub
from fat5.data.sources import TextSource, read_documents
from fat5.errors import DataError

DOCUMENTS = ["Première ligne\nseconde ligne", "Deuxième document", "  troisième : «été»"]


def read(source, **settings) -> list[str]:
    return list(read_documents(TextSource([source], **settings)))


@pytest.mark.parametrize(
    ("name", "possible"),
    [
        ("corpus", True),
        ("owner/corpus", True),
        ("owner/corpus-v1.1", True),
        ("owner/corpus.fr", True),
        ("corpus-20231101.5", True),
        ("./corpus", False),
        ("../corpus", False),
        ("~/corpus", False),
        ("/data/corpus", False),
        ("data/texts/corpus", False),
        ("corpus/", False),
        ("corpus.text", False),
        ("corpus.fr", False),
        ("data/corpus.JSONL.zst", False),
        ("fat5:sample", False),
    ],
)
def test_what_looks_like_a_path_is_no_name_of_the_hub(name, possible):
    assert may_be_on_hub(name) is possible


def test_an_endpoint_that_names_no_host_cannot_be_asked(monkeypatch):
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setattr(hub, "_host", lambda: "x" * 70 + ".example")
    assert not hub.hub_resolves()


@pytest.fixture
def network(monkeypatch):
    """Tells `datasets` apart from the hub: the names that it was asked for are kept, and none is there."""
    asked = []

    def load(name, *args, **kwargs):
        asked.append((name, datasets.config.HF_HUB_OFFLINE))
        raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{name}' doesn't exist on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked


def test_a_path_is_never_asked_of_the_hub(network, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for path in ("corpus.text", "./corpus", "data/corpus.csv", str(tmp_path / "corpus")):
        with pytest.raises(FileNotFoundError, match=r"corpus.* does not exist"):
            read(path)
    assert network == []


def test_without_a_network_the_hub_is_not_asked(monkeypatch, tmp_path):
    """Pitfall: half a minute of retries before a typo is told."""

    def unreachable(*_):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus_fr").mkdir()
    monkeypatch.setattr("socket.getaddrinfo", unreachable)
    monkeypatch.setattr("fat5.data.hub.getproxies", dict)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    started = time.perf_counter()
    message = (
        r"'corpus_rf' is no file or folder here.*from the hub: there is no network to it here \(.* has no address\), "
        r"and in the cache: nothing of that name; did you mean 'corpus_fr'\?$"
    )
    with pytest.raises(DataError, match=message):
        read("corpus_rf")
    assert time.perf_counter() - started < 5
    assert not datasets.config.HF_HUB_OFFLINE
    # What an earlier load left in the cache is read.
    corpus = tmp_path / "a.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    datasets.load_dataset("json", data_files=str(corpus), cache_dir=str(tmp_path / "cache"))
    (stored,) = (tmp_path / "cache" / "json").glob("default-*")
    (file,) = stored.rglob("json-train.arrow")
    file.rename(file.with_name("corpus-train.arrow"))
    (tmp_path / "cache" / "owner___corpus").mkdir()
    stored.rename(tmp_path / "cache" / "owner___corpus" / "default")
    assert read("owner/corpus") == DOCUMENTS
    with pytest.raises(DataError, match=r"in the cache: .*config 'fr'.*Available configs in the cache: \['default'\]"):
        read("owner/corpus", name="fr")


def test_a_hub_name_is_streamed(monkeypatch):
    calls = []

    def load(path, name=None, *, split, streaming):
        calls.append((path, name, split, streaming))
        rows = [{"id": i, "content": text} for i, text in enumerate(DOCUMENTS)]
        return datasets.IterableDataset.from_generator(lambda: iter(rows))

    monkeypatch.setattr(hub, "hub_resolves", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read("owner/corpus", name="fr", text_column="content", max_bytes=40) == DOCUMENTS[:2]
    assert calls == [("owner/corpus", "fr", "train", True)]
    with pytest.raises(DataError, match=r"owner/corpus: no column 'text'; columns: id, content"):
        read("owner/corpus")


def test_a_name_that_is_neither_here_nor_on_the_hub_says_so(network, monkeypatch):
    monkeypatch.setattr(hub, "hub_resolves", lambda: True)
    with pytest.raises(DataError, match=r"'corpsu' is no file or folder here.* hub: Dataset 'corpsu' doesn't exist"):
        read("corpsu")
    assert network == [("corpsu", False)]


def test_a_hub_data_set_that_fails_midway_names_the_row(monkeypatch):
    def rows():
        yield from ({"text": text} for text in ["un"] * 256)
        raise RuntimeError("connection lost")

    stream = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: stream)
    with pytest.raises(DataError, match=r"owner/corpus: reading failed after row 256: .*connection lost"):
        read("owner/corpus")
