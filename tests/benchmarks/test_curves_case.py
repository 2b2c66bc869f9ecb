"""The curves case on a tiny corpus of text."""

from __future__ import annotations

import gzip
import json
from itertools import islice

import pytest

from benchmarks.cases.curves import conclusions
from benchmarks.command_line import main
from benchmarks.curves.comparison import newest_comparison
from benchmarks.figures.curves import draw_curves
from benchmarks.results import read_json, read_rows, write_json
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


def command(corpus) -> list[str]:
    arguments = ["--train", "train.jsonl.gz", "--validation", "validation.jsonl.gz", "--tokenizer", "tok"]
    arguments = [word if word.startswith("--") else str(corpus / word) for word in arguments]
    arguments += ["--model", "smoke", "--batch", "4", "--input-length", "64", "--target-length", "32", "--workers", "0"]
    arguments += ["--evaluate-every", "4", "--eval-batches", "2", "--max-steps", "8", "--warmup", "2", "--eager"]
    return ["curves", *arguments]


def test_both_models_have_the_same_curve_over_tokens(corpus, capsys):
    assert main([*command(corpus), "--results", str(corpus)]) == 0
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


def test_two_runs_that_draw_one_curve_each_are_one_comparison(corpus, capsys):
    files = []
    for day, name in enumerate(("transformers", "fat5"), start=1):
        files.append(str(corpus / f"{name}.json"))
        assert main([*command(corpus), "--implementations", name, "--no-save", "--json", files[-1]]) == 0
        rows = read_json(corpus / f"{name}.json")
        assert {row["implementation"] for row in rows} == {f"{name}-eager"}
        # So short a run may begin in the same second.
        write_json(corpus / f"{name}.json", [row | {"date": f"2026-01-0{day}T00:00:00Z"} for row in rows])
        said = capsys.readouterr().out
        assert "one of the two has no curve here" in said
        assert f"{name}-eager: validation is best at step 8" in said
    results = corpus / "results"
    assert main(["record", *files, "--results", str(results)]) == 0
    figure = draw_curves(read_rows(results / "curves.csv"))
    for axes in figure.axes:
        assert [line.get_label() for line in axes.get_lines()] == ["FAT5", "Transformers' T5"]
        assert [len(line.get_xdata()) for line in axes.get_lines()] == [3, 3]
    assert main(["report", "--results", str(results), "--output", str(corpus / "page.html")]) == 0
    assert "1 goals met, 0 missed" in capsys.readouterr().out
    page = (corpus / "page.html").read_text()
    caption = page.split("<figcaption>")[1].split("</figcaption>")[0]
    assert all(f"--implementations {name}" in caption for name in ("fat5", "transformers"))


def drawn(name: str, date: str, **settings) -> dict:
    same = {"model": "8x64", "train": "tokens", "lr": 0.01, "gpu": "H200", "eager": False}
    return {**same, **settings, "implementation": name, "date": date, "eval_loss": 4.0}


@pytest.mark.parametrize(
    "other", [{"model": "base"}, {"train": "text"}, {"lr": 0.02}, {"gpu": "H100"}, {"eager": True}, {"minutes": 9}]
)
def test_curves_with_other_settings_are_not_compared(other):
    ours, theirs = drawn("fat5-compiled", "2", **other), drawn("transformers-compiled", "1")
    assert newest_comparison([theirs, ours]) == [ours]
    theirs |= other
    assert newest_comparison([theirs, ours]) == [ours, theirs]


def test_the_newest_curve_of_each_model_is_compared():
    old, new = (drawn("fat5-compiled", date) for date in ("1", "4"))
    theirs, later = drawn("transformers-compiled", "2"), drawn("transformers-compiled", "3")
    assert newest_comparison([old, theirs, later, new]) == [new, later]
    # A curve that has no other beside it does not replace a comparison, a newer comparison does.
    alone = drawn("fat5-compiled", "5", train="text")
    assert newest_comparison([old, theirs, alone]) == [old, theirs]
    second = drawn("transformers-compiled", "6", train="text")
    assert newest_comparison([old, theirs, alone, second]) == [alone, second]
    assert newest_comparison([drawn("fat5-compiled", "7") | {"eval_loss": ""}]) == []
    assert newest_comparison([]) == []


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


def test_an_unknown_implementation_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["curves", "--implementations", "fta5"])
    assert "'fta5' (choose from" in capsys.readouterr().err
