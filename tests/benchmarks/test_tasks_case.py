"""`python -m benchmarks tasks`: pretrain, finetune twins, and go on where an earlier command ended."""

from __future__ import annotations

import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.command_line import main
from benchmarks.results import read_json, read_rows
from benchmarks.tasks import pretraining
from fat5.data.sample import sample_documents
from tests.tasks.conftest import topic_rows

TINY = [
    "model.d_model=32", "model.d_kv=8", "model.d_ff=48", "model.num_layers=1", "model.num_decoder_layers=1",
    "model.num_heads=4", "model.vocab_size=null", "denoising.max_input_length=96", "denoising.max_target_length=96",
    "denoising.encoder_budget=384", "training.num_workers=0",
]  # fmt: skip


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A corpus and one task, in the layout of the French sets."""
    monkeypatch.setattr(pretraining, "CALIBRATION_STEPS", 6)
    documents = list(sample_documents())[:260]
    for name, texts in (("corpus_fr", documents[:240]), ("corpus_fr_valid", documents[240:])):
        pq.write_table(pa.table({"text": texts, "source": ["x"] * len(texts)}), tmp_path / f"{name}.parquet")
    rows = [row | {"split": split} for split in ("train", "valid", "test") for row in topic_rows(16, len(split))]
    for number, row in enumerate(rows):
        row["id"] = str(number)
        row["text"] += f" Ligne {number} du document, que personne d'autre n'a."
    (tmp_path / "tasks").mkdir()
    random.Random(0).shuffle(rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "tasks" / "topic_fr.parquet")
    return tmp_path


def command(data, *more):
    settings = ["training.max_steps=2", "options.max_length=64"]
    return [
        "tasks", "--data", str(data), "--work", str(data / "work"), "--minutes", "0.001", "--vocab-size", "640",
        "--results", str(data / "results"), "--json", str(data / "rows.json"), "--only", "topic_fr",
        "--pretrain", *TINY, "--finetune", *settings, *more,
    ]  # fmt: skip


def test_pretrain_then_finetune_and_go_on(data, capsys):
    assert main([*command(data), "--no-leaks", "--only-pretrain"]) == 0
    (row,) = read_json(data / "rows.json")
    assert row["table"] == "pretraining"
    assert row["tokens_seen"] > 0
    assert main([*command(data), "--no-leaks"]) == 0
    text = capsys.readouterr().out
    rows = {row["implementation"]: row for row in read_json(data / "rows.json") if row["table"] == "tasks"}
    assert list(rows) == ["pretrained", "random", "majority", "tf-idf + logistic regression"]
    assert all(0 <= row["score"] <= 100 for row in rows.values())
    assert "topic_fr: pretrained over its random twin" in text
    steps = [row["steps"] for row in read_rows(data / "results" / "tasks.csv") if row["table"] == "pretraining"]
    assert len(steps) == 2
    assert steps[0] == steps[1]  # the second command found the run complete


def test_a_random_twin_alone_needs_no_pretraining(data):
    assert main([*command(data), "--no-leaks", "--models", "random"]) == 0
    rows = read_json(data / "rows.json")
    assert [row["implementation"] for row in rows] == ["random", "majority", "tf-idf + logistic regression"]
    assert not (data / "work" / "run").exists()


def test_what_is_missing_is_named(data, capsys):
    for arguments, message in (
        (["tasks"], "--data is missing"),
        (command(data / "no"), "there is no"),
        ([*command(data), "--config", str(data / "task")], "did you mean"),
    ):
        with pytest.raises(SystemExit):
            main([*arguments, "--no-save"])
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_leak_makes_the_command_fail(data, capsys):
    rows = pq.read_table(data / "tasks" / "topic_fr.parquet").to_pylist()
    leaked = next(row["text"] for row in rows if row["split"] == "test")
    texts = pq.read_table(data / "corpus_fr.parquet")["text"].to_pylist()
    table = pa.table({"text": [*texts, leaked], "source": ["x"] * (len(texts) + 1)})
    pq.write_table(table, data / "corpus_fr.parquet")
    assert main([*command(data), "--only-pretrain"]) == 1
    assert "leaks topic_fr: FAILED; 32 held-out documents: 0 known by id, 1 whole" in capsys.readouterr().out
