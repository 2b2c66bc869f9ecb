"""Tables in their layouts, columns found or asked for, splits that exist and are not empty."""

from __future__ import annotations

import gzip
import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fat5.data.table_files import read_table
from fat5.errors import ConfigError, DataError
from fat5.tasks.registry import task_class
from fat5.tasks.splits import TaskData, load_splits
from tests.tasks.conftest import topic_rows, write_rows, write_task


def load(source=None, *, need_train=True, task="classification", **settings):
    data = TaskData(source=None if source is None else str(source), **settings)
    return load_splits(task, task_class(task).fields, data, need_train=need_train)


def test_a_table_with_a_column_that_names_the_split(tmp_path):
    splits = load(write_task(tmp_path, "classification", train=5, other=3))
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (5, 3, 3)
    assert splits.test_name == "test"
    assert splits.train[0].keys() == {"text", "label", "text_pair"}


def test_a_folder_of_tables_of_several_formats(tmp_path):
    rows = topic_rows(6)
    write_rows(tmp_path / "data" / "validation.jsonl", rows[:2])
    for part in range(2):
        table = pa.Table.from_pylist(rows[2 * part : 2 * part + 2])
        pq.write_table(table, tmp_path / "data" / f"train-0000{part}-of-00002.parquet", compression="zstd")
    (tmp_path / "data" / "test.json").write_text(json.dumps({"data": rows[4:]}))
    splits = load(tmp_path)
    assert [row["text"] for row in splits.train] == [row["text"] for row in rows[:4]]
    assert [row["text"] for row in splits.test] == [row["text"] for row in rows[4:]]


def test_files_for_each_split_csv_and_gzip(tmp_path):
    (tmp_path / "a.csv").write_text('text,label\n"Un, deux",1\nTrois,0\n', encoding="utf-8")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(json.dumps({"text": "Été", "label": True}) + "\n")
    splits = load(train=str(tmp_path / "a.csv"), validation=str(tmp_path / "b.jsonl.gz"))
    assert [row["text"] for row in splits.train] == ["Un, deux", "Trois"]
    assert splits.validation == splits.test == [{"text": "Été", "label": "1", "text_pair": None}]
    assert splits.test_name == "validation"


def test_classes_that_a_parquet_file_of_the_hub_declares_get_their_names(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "tokens": datasets.List(datasets.Value("string")),
            "ner_tags": datasets.List(datasets.ClassLabel(names=["O", "B-PER"])),
            "label": datasets.ClassLabel(names=["non", "oui"]),
        }
    )
    rows = {"tokens": [["Il", "Eve"]], "ner_tags": [[0, 1]], "label": [-1]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "train.parquet")
    (row,) = read_table(tmp_path / "train.parquet")
    assert row == {"tokens": ["Il", "Eve"], "ner_tags": ["O", "B-PER"], "label": None}
    # The same from a folder that `datasets` wrote, with the splits that it names.
    saved = datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows, features=features)})
    saved.save_to_disk(tmp_path / "saved")
    splits = load(tmp_path / "saved", task="token-classification", validation="train")
    assert splits.train[0]["tags"] == ["O", "B-PER"]


def test_local_files_need_no_package_datasets(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert len(load(write_task(tmp_path, "classification")).train) == 24
    with pytest.raises(ConfigError, match=r"the data set some/set needs the package datasets"):
        load("some/set")


def test_paths_and_names_without_a_network_are_not_asked_of_the_hub(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: pytest.fail("the hub was asked"))
    (tmp_path / "tables").mkdir()
    for path in ("./tabels", "tabels.csv", "data/tabels.parquet"):
        with pytest.raises(FileNotFoundError, match=f"there is no file or folder {path}"):
            load(path)
    asked = []

    def offline(name, *args, **kwargs):
        asked.append((name, datasets.config.HF_HUB_OFFLINE))
        raise ConnectionError("Couldn't reach it")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    monkeypatch.setattr("fat5.data.hub.hub_resolves", lambda: False)
    with pytest.raises(DataError, match=r"'tabels' is no file or folder here.*no network.*; did you mean 'tables'\?"):
        load("tabels")
    assert asked == [("tabels", True)]


def test_missing_columns_are_named_with_those_found(tmp_path):
    source = write_rows(tmp_path / "train.jsonl", [{"txt": "a", "note": "b"}] * 2)
    with pytest.raises(DataError, match=r"a column for 'text'.*columns are txt, note.*data\.columns\.text=COLUMN"):
        load(source)
    with pytest.raises(DataError, match=r"data\.columns\.text is 'texte', but the columns are txt, note"):
        load(source, columns={"text": "texte", "label": "note"})
    with pytest.raises(ConfigError, match=r"classification reads the fields text, label, text_pair; did"):
        load(source, columns={"texts": "txt"})
    splits = load(source, columns={"text": "txt", "label": "note"})
    assert splits.train[0]["text"] == "a"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": 3, "label": "a"}, r"train of .*, row 1, column 'text': expected text, got int '3'"),
        ({"text": " ", "label": "a"}, "expected text, got a blank one"),
        ({"text": "a", "label": None}, "column 'label': expected the name or the number of a class, got none"),
    ],
)
def test_values_of_a_wrong_form_are_named_with_their_place(tmp_path, row, message):
    source = write_rows(tmp_path / "x.jsonl", [{"text": "a", "label": "b"}, row])
    with pytest.raises(DataError, match=message):
        load(source)


def test_empty_and_missing_splits(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"empty\.jsonl holds no row"):
        load(tmp_path / "empty.jsonl")
    source = write_rows(tmp_path / "x.jsonl", [row | {"split": "test"} for row in topic_rows(3)])
    with pytest.raises(DataError, match=r"has no training split; its splits are test"):
        load(source)
    assert len(load(source, need_train=False).test) == 3
    with pytest.raises(
        DataError, match=r"data\.train is 'tset', which is no file and no split; the splits are test; did"
    ):
        load(source, train="tset")
    with pytest.raises(FileNotFoundError, match=r"there is no file or folder .*; did you mean '.*/empty\.jsonl'"):
        load(tmp_path / "emtpy.jsonl")
    with pytest.raises(FileNotFoundError, match=r"there is no file .*; did you mean '.*/x\.jsonl'"):
        load(train=str(tmp_path / "xx.jsonl"))
    alone = write_rows(tmp_path / "one.jsonl", topic_rows(1))
    with pytest.raises(DataError, match=r"at least 2 training rows to hold some out of; got train of 1 rows"):
        load(alone)


def test_splits_of_other_names_are_named_in_a_warning(tmp_path, caplog):
    names = ["train", "trian", "trian", None, "test"]
    rows = [row | {"split": name} for row, name in zip(topic_rows(5), names, strict=True)]
    splits = load(write_rows(tmp_path / "x.jsonl", [*rows, rows[0]]))
    assert len(splits.test) == 1
    assert "splits not used: 'trian' of 2 rows, 'None' of 1 rows" in caplog.text


def test_settings_that_name_no_data():
    with pytest.raises(ConfigError, match=r"data\.source \(--data\) is missing"):
        load()


def test_what_is_held_out_for_validation_is_always_the_same(tmp_path):
    source = write_rows(tmp_path / "x.jsonl", topic_rows(40))
    first, second = load(source, validation_fraction=0.2), load(source, validation_fraction=0.2)
    assert len(first.validation) == 8
    assert first.validation == second.validation
    texts = {row["text"] for row in first.train}
    assert not texts & {row["text"] for row in first.validation}
    assert len(texts) == 32
    limited = load(source, max_train=5, max_validation=2)
    assert (len(limited.train), len(limited.validation)) == (5, 2)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n[1]\n', "a.jsonl, line 2: expected a JSON object, got list"),
        ("a.jsonl", b'{"text"', "a.jsonl, line 1: no JSON"),
        ("a.json", b'{"rows": []}', 'expected a list of objects, or an object with one under "data"'),
        ("a.csv", "text,label\né,1\n".encode("latin-1"), "a.csv is not UTF-8"),
        ("a.csv", b"text,text,label\na,b,1\n", "more than one column of the name 'text'"),
        ("a.csv", b"text,label\na,1\nb, c,0\n", "a.csv, line 3: 3 values for 2 columns"),
        ("a.csv", b"text;label\na;1\n", "seems to be separated by ';', expected ','"),
        ("a.parquet", b"PAR1 no", "a.parquet is no complete Parquet file"),
        ("a.docx", b"", "a.docx is no table; expected a file of .jsonl"),
    ],
)
def test_damaged_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_table(tmp_path / name)


def test_a_csv_file_may_hold_long_texts_and_unnamed_columns(tmp_path):
    long = "mot, " * 40_000
    (tmp_path / "a.csv").write_text(f'text,label,,\n"{long}",1,,\nb,0,,\n', encoding="utf-8")
    rows = read_table(tmp_path / "a.csv")
    assert [(row["text"], row["label"]) for row in rows] == [(long, "1"), ("b", "0")]


def test_lone_surrogates_of_json_are_replaced_in_place(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"text": "a \\ud83d b", "answers": {"text": ["\\ude00"]}, "n": 1}\n{"text": "\\ud83d\\ude00"}'
    )
    assert read_table(tmp_path / "a.jsonl") == [
        {"text": "a \ufffd b", "answers": {"text": ["\ufffd"]}, "n": 1},
        {"text": "\U0001f600"},
    ]
