"""The curves case on a tiny corpus of text."""

from __future__ import annotations

import gzip
import json
from itertools import islice

import pytest

from benchmarks.cases.curves import conclusions
from benchmarks.command_line import main
from benchmarks.results import read_rows
from fat5.data.sample import sample_documents
from fat5.data.tokenizer import save_tokenizer
from fat5.data.tokenizer_training import TokenizerConfig, train_tokenizer


@pytest.fixture
def corpus(tmp_path):
    documents = list(islice(sample_documents(), 120))
    save_tokenizer(train_tokenizer(documents, TokenizerConfig(vocab_size=640), show_progress=False), tmp_path / "tok")
    for name, part in (("train", documents[:100]), ("validation", documents[100:])):
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in part)
    return tmp_path


def test_both_models_have_the_same_curve_over_tokens(corpus, capsys):
    arguments = ["--train", "train.jsonl.gz", "--validation", "validation.jsonl.gz", "--tokenizer", "tok"]
    arguments = [word if word.startswith("--") else str(corpus / word) for word in arguments]
    arguments += ["--model", "smoke", "--batch", "4", "--input-length", "64", "--target-length", "32", "--workers", "0"]
    arguments += ["--evaluate-every", "4", "--eval-batches", "2", "--max-steps", "8", "--warmup", "2", "--eager"]
    assert main(["curves", *arguments, "--results", str(corpus)]) == 0
    rows = read_rows(corpus / "curves.csv")
    curves = {
        name: [row for row in rows if row["implementation"] == f"{name}-eager"] for name in ("fat5", "transformers")
    }
    assert [row["step"] for row in curves["fat5"]] == ["0", "4", "8"]
    for ours, theirs in zip(curves["fat5"], curves["transformers"], strict=True):
        for name in ("step", "tokens", "epoch"):
            assert ours[name] == theirs[name]
        assert float(ours["eval_loss"]) == pytest.approx(float(theirs["eval_loss"]), rel=1e-3)
        assert float(ours["eval_accuracy"]) == pytest.approx(float(theirs["eval_accuracy"]), abs=0.02)
    losses = [float(row["eval_loss"]) for row in curves["fat5"]]
    assert losses[2] < losses[1] < losses[0]
    assert 0 < float(curves["fat5"][1]["seconds"]) < float(curves["fat5"][2]["seconds"])
    printed = capsys.readouterr().out
    assert "met" in printed
    assert "validation is best at step 8" in printed
    assert main(["plot", "--results", str(corpus), "--figures", str(corpus / "figures")]) == 0
    assert (corpus / "figures" / "curves.png").stat().st_size > 10_000


def test_conclusions_compare_at_the_last_common_step():
    def point(name: str, step: int, loss: float) -> dict:
        return {"implementation": name, "step": step, "epoch": step / 10, "tokens": step * 100, "eval_loss": loss}

    rows = [point("fat5-compiled", step, loss) for step, loss in ((1, 5.0), (2, 4.0), (3, 4.5))]
    rows += [point("transformers-compiled", step, loss) for step, loss in ((1, 5.0), (2, 4.2))]
    text = "\n".join(conclusions(rows))
    assert "MISSED" in text
    assert "same 200 tokens" in text
    assert "1.50 times the tokens" in text
    assert "fat5-compiled: validation is best at step 2" in text


def test_a_missing_corpus_is_named(corpus, capsys):
    with pytest.raises(SystemExit):
        main(["curves", "--train", str(corpus / "train.jsonl.gz"), "--no-save"])
    assert "expected --validation and --tokenizer" in capsys.readouterr().err
