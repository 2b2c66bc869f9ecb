"""The tutorial's script, from a file of text to an exported model, and its page."""

from __future__ import annotations

import json
import runpy
from itertools import islice

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from fat5.data.sample import sample_documents
from tests.tasks.conftest import one_thread, write_rows  # noqa: F401

from .markdown import ROOT, blocks, commands
from .stand_ins import FINETUNING, PRETRAINING

SCRIPT = runpy.run_path(str(ROOT / "examples" / "tutorial.py"))
PAGE = "docs/tutorial.md"


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """The script on a local file in the place of a download."""
    root = tmp_path_factory.mktemp("tutorial")
    corpus = write_rows(root / "corpus.jsonl", [{"text": text} for text in islice(sample_documents(), 150)])
    arguments = [
        "--output", str(root / "out"), "--source", str(corpus), "--config", str(ROOT / "configs" / "minipile.yaml"),
        "--vocab-size", "1024", "--validation-fraction", "0.1", "--finetuning", " ".join(FINETUNING),
    ]  # fmt: skip
    assert SCRIPT["main"]([*arguments, *PRETRAINING, "training.max_steps=8", "training.eval_at_start=true"]) == 0
    return root / "out"


def test_every_step_leaves_its_result(outcome):
    for file in ("tokenizer/tokenizer.json", "tokens/validation/manifest.json", "run/loss.png", "order/result.md"):
        assert (outcome / file).is_file(), file
    result = json.loads((outcome / "order" / "result.json").read_text())
    assert {"majority", "tf-idf + logistic regression"} <= set(result["baselines"])


def test_it_learns(outcome):
    log = json.loads((outcome / "run" / "trainer_state.json").read_text())["log_history"]
    losses = [entry["eval_loss"] for entry in log if "eval_loss" in entry]
    assert losses[-1] < losses[0]


def test_the_export_is_a_t5_of_stock_transformers(outcome):
    model = AutoModelForSeq2SeqLM.from_pretrained(outcome / "exported").eval()
    tokenizer = AutoTokenizer.from_pretrained(outcome / "exported")
    ours = AutoModelForSeq2SeqLM.from_pretrained(outcome / "run").eval()
    assert [type(m).__name__ for m in (model, ours)] == ["T5ForConditionalGeneration", "FAT5ForConditionalGeneration"]
    inputs = tokenizer("La loi <extra_id_0> article.", return_tensors="pt")
    start = torch.tensor([[0, 5]])
    want = ours(**inputs, decoder_input_ids=start).logits
    torch.testing.assert_close(model(**inputs, decoder_input_ids=start).logits, want, rtol=1e-4, atol=1e-4)


def test_both_classes_have_the_same_words():
    words = [f"mot{number}" for number in range(40)]
    rows = list(SCRIPT["order_rows"](iter([" ".join(words)] * 60 + ["trop court"]), 100))
    assert len(rows) == 60
    assert {row["label"] for row in rows} == {"kept", "mixed"}
    assert {frozenset(row["text"].split()) for row in rows} == {frozenset(words[: SCRIPT["WORDS"]])}
    assert all((row["text"].split() == words[: SCRIPT["WORDS"]]) == (row["label"] == "kept") for row in rows)
    assert {row["split"] for row in rows} == set(SCRIPT["SPLITS"])


def test_the_page_shows_the_commands_that_the_script_runs():
    found = [parts[-1] for block in blocks("bash") if block.page == PAGE for parts in commands(block.text)]
    shown = [words[1:] for words in found if words[0] == "fat5"]
    assert shown == list(SCRIPT["commands"](SCRIPT["parse"](["--output", "tutorial"])))
