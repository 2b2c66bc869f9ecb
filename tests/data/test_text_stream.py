"""Documents out of weighted sources: each read once an epoch by one reader, in an order that a position restores."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import datasets
import pytest

from fat5.data.text_stream import DocumentStream, StreamConfig, StreamSource
from fat5.errors import ConfigError, DataError


def write_lines(folder, name: str, texts) -> str:
    path = folder / name
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def texts(label: str, count: int) -> list[str]:
    return [f"{label}{number}" for number in range(count)]


@pytest.fixture
def sources(tmp_path, monkeypatch) -> dict[str, StreamSource]:
    """One source of 60 documents of each kind."""
    for number in range(6):
        write_lines(tmp_path, f"part{number}.jsonl", texts("many", 60)[number::6])
    stored = datasets.Dataset.from_dict({"text": texts("saved", 60), "number": list(range(60))})
    stored.save_to_disk(str(tmp_path / "saved"))
    hub = {
        "hub/sharded": datasets.Dataset.from_dict({"text": texts("sharded", 60)}).to_iterable_dataset(num_shards=6),
        "hub/made": datasets.IterableDataset.from_generator(lambda: ({"text": text} for text in texts("made", 60))),
    }
    monkeypatch.setattr("fat5.data.hub.hub_resolves", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *_, **__: hub[name])
    return {
        "many files": StreamSource([str(tmp_path / "part*.jsonl")]),
        "one file": StreamSource([write_lines(tmp_path, "one.jsonl", texts("one", 60))]),
        "saved data set": StreamSource([str(tmp_path / "saved")]),
        "hub shards": StreamSource(["hub/sharded"]),
        "hub generator": StreamSource(["hub/made"]),
    }


KINDS = ["many files", "one file", "saved data set", "hub shards", "hub generator"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_readers", [1, 4, 6])
def test_readers_share_every_document_once_an_epoch(sources, kind, num_readers):
    """Pitfall: workers or ranks read the same documents."""
    config = StreamConfig([sources[kind]], shuffle_buffer=1)
    label = {"many files": "many", "one file": "one", "saved data set": "saved"}.get(kind) or (
        "sharded" if kind == "hub shards" else "made"
    )
    epoch, seen = texts(label, 60), []
    for reader in range(num_readers):
        stream = DocumentStream(config, seed=3, reader=reader, num_readers=num_readers)
        share = [next(stream)]
        while (text := next(stream)) != share[0] and text not in share:
            share.append(text)
        seen += share
    assert sorted(seen) == sorted(epoch)


@pytest.mark.parametrize("kind", KINDS)
def test_a_position_taken_anywhere_leads_to_the_same_documents(sources, kind):
    config = StreamConfig([sources[kind], StreamSource(["fat5:sample"], weight=0.5)], shuffle_buffer=7)
    options = {"seed": 5, "reader": 1, "num_readers": 3}
    whole = list(islice(DocumentStream(config, **options), 90))
    for taken in (0, 1, 6, 7, 8, 33, 70):
        stream = DocumentStream(config, **options)
        assert list(islice(stream, taken)) == whole[:taken]
        position = json.loads(json.dumps(stream.state_dict()))
        resumed = DocumentStream(config, **options)
        resumed.load_state_dict(position)
        assert list(islice(resumed, 90 - taken)) == whole[taken:]


def test_sources_come_in_proportion_to_their_weights(tmp_path):
    config = StreamConfig(
        [
            StreamSource([write_lines(tmp_path, f"{label}.jsonl", texts(label, 50))], weight=weight)
            for label, weight in (("a", 6.0), ("b", 3.0), ("c", 1.0))
        ],
        shuffle_buffer=10,
    )
    counts = Counter(text[0] for text in islice(DocumentStream(config, seed=0), 5000))
    assert counts["a"] / 5000 == pytest.approx(0.6, abs=0.03)
    assert counts["b"] / 5000 == pytest.approx(0.3, abs=0.03)


def test_blocks_are_shuffled_each_in_its_own_way_and_files_anew_each_epoch(tmp_path):
    source = StreamSource([write_lines(tmp_path, "a.jsonl", texts("a", 40))])
    stream = DocumentStream(StreamConfig([source], shuffle_buffer=20), seed=0)
    blocks = [list(islice(stream, 20)) for _ in range(4)]
    assert [sorted(block) for block in blocks] == [sorted(texts("a", 40)[start : start + 20]) for start in (0, 20)] * 2
    orders = {tuple(int(text[1:]) % 20 for text in block) for block in blocks}
    assert len(orders) == 4
    files = [write_lines(tmp_path, f"{number}.jsonl", [str(number)]) for number in range(12)]
    stream = DocumentStream(StreamConfig([StreamSource(files)], shuffle_buffer=1), seed=0)
    first, second = (list(islice(stream, 12)) for _ in range(2))
    assert sorted(first) == sorted(second)
    assert first != second


def test_a_share_without_a_document_is_an_error(tmp_path):
    source = StreamSource([write_lines(tmp_path, "a.jsonl", ["un", "deux"])])
    stream = DocumentStream(StreamConfig([source]), seed=0, reader=3, num_readers=4)
    with pytest.raises(DataError, match=r"a\.jsonl holds no document for one of 4 readers.*use fewer workers"):
        next(stream)


def test_a_wrong_column_names_the_nearest(tmp_path, sources):
    (tmp_path / "b.jsonl").write_text('{"texte": "un"}\n')
    for source in (StreamSource([str(tmp_path / "b.jsonl")]), StreamSource(["hub/made"], text_column="texte")):
        with pytest.raises(DataError, match=r"no column 'texte?'; columns: .*did you mean"):
            next(DocumentStream(StreamConfig([source]), seed=0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StreamConfig([]), "at least one source"),
        (lambda: StreamConfig([StreamSource(["a.txt"])], shuffle_buffer=0), "shuffle_buffer must be 1 or more, got 0"),
        (lambda: StreamSource(["a.txt"], weight=0.0), r"weight of a\.txt must be positive, got 0\.0"),
        (lambda: StreamSource(["a.txt"], max_bytes="1MB"), r"max_bytes of a\.txt must be null in a stream"),
    ],
)
def test_wrong_settings_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
