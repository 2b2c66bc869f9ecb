"""Held-out text in a pretraining corpus is found, by id and by text; the French sets have none.

The French sets are looked at where FAT5_FRENCH_DATA names the folder that holds `corpus_fr.parquet` and `tasks`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from fat5.tasks.leaks import index_corpus
from tests.tasks.conftest import topic_rows

FRENCH_DATA = os.environ.get("FAT5_FRENCH_DATA")
PARAGRAPH = "Le conseil municipal se réunit au moins une fois par trimestre, sur convocation du maire de la commune."


def document(number: int) -> str:
    return "\n".join(f"{PARAGRAPH[:-1]} numéro {number}, alinéa {line}." for line in range(6))


def test_a_corpus_without_the_held_out_documents_is_clean():
    held_out = [{"id": f"F{number}", "text": document(number)} for number in range(5)]
    index = index_corpus([{"text": document(number), "id": f"G{number}"} for number in range(10, 50)])
    report = index.find(held_out, ["text"])
    assert (report.documents, report.leaks, report.shared_lines) == (5, 0, 0.0)


def test_each_kind_of_leak_is_found():
    held_out = [{"id": f"F{number}", "text": document(number)} for number in range(4)]
    almost = document(2).replace("alinéa 5", "alinéa 99")
    retyped = "Introduction.\n" + document(1).replace(" numéro", "  NUMÉRO").replace("'", "’") + "\nFin."
    corpus = [{"text": "rien", "id": "F0"}, {"text": retyped}, {"text": almost}, {"text": document(3), "id": "x"}]
    report = index_corpus(corpus).find(held_out, ["text"])
    assert report.ids == ["F0"]
    assert report.texts == [document(3)[:80]]
    assert report.covered == [document(1)[:80], document(2)[:80]]
    assert report.leaks == 4
    assert str(report).startswith("4 held-out documents: 1 known by id, 1 whole in the corpus, 2 mostly in it")


def test_a_held_out_sentence_that_is_a_line_of_the_corpus_is_found():
    sentence = "Ouvrez la boîte de dialogue des options."
    report = index_corpus([f"Aide\n{sentence.upper()}\nFin"]).find([{"tokens": sentence.split()}], ["tokens"])
    assert report.texts == [sentence]


def test_splits_of_a_task_do_not_share_documents():
    train = topic_rows(20)
    index = index_corpus(train)
    assert index.find(topic_rows(20, seed=1), ["text"], min_length=10).ids == []
    assert index.find([train[3]], ["text"], min_length=10).leaks == 2  # by id and by text


@pytest.mark.slow
@pytest.mark.skipif(FRENCH_DATA is None, reason="FAT5_FRENCH_DATA names no folder")
def test_the_french_tasks_do_not_leak_into_the_corpus():
    root = Path(str(FRENCH_DATA))
    index = index_corpus(pq.read_table(root / "corpus_fr.parquet", columns=["text"])["text"].to_pylist())
    columns = {
        "topic_fr": ["text"],
        "summary_fr": ["document"],
        "qa_fr": ["context"],
        "entities_fr": ["tokens"],
        "similarity_fr": ["sentence1", "sentence2"],
        "translation_en_fr": ["fr"],
    }
    for name, texts in columns.items():
        rows = pq.read_table(root / "tasks" / f"{name}.parquet").to_pylist()
        held_out = [row for row in rows if row["split"] != "train"]
        report = index.find(held_out, texts)
        assert not report.ids, (name, report.ids)
        assert not report.texts, (name, report.texts)
        # Documents made of stock paragraphs that many others hold, too.
        assert len(report.covered) <= 0.01 * len(held_out), (name, report.covered)
        train = {str(row["id"]) for row in rows if row["split"] == "train" and "id" in row}
        assert not train & {str(row["id"]) for row in held_out if "id" in row}, name
