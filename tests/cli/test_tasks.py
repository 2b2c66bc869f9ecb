"""`fat5 finetune`, `evaluate` and `sweep` as a user types them."""

from __future__ import annotations

import json
import shutil

import pytest

from fat5.cli import main as cli
from fat5.tasks.registry import TASKS
from fat5.training.checkpoints import seal_checkpoint
from tests.tasks.conftest import checkpoint, write_task  # noqa: F401

SHORT = ["training.max_steps=2", "training.country=null", "options.max_length=64"]


def test_finetune_then_evaluate_beside_the_baselines(checkpoint, tmp_path, capsys):  # noqa: F811
    data = write_task(tmp_path, "classification")
    out = tmp_path / "out"
    command = ["finetune", "classification", str(checkpoint), "--data", str(data), "--output", str(out)]
    assert cli.main([*command, "--seeds", "2", "--baseline", *SHORT]) == 0
    text = capsys.readouterr().out
    assert "| score (%) | 2 seeds | majority | tf-idf + logistic regression |" in text
    assert "| **accuracy** |" in text
    result = json.loads((out / "result.json").read_text())
    assert [run["seed"] for run in result["runs"]] == [0, 1]
    evaluate = ["evaluate", "classification", str(out / "seed-1"), "--data", str(data), "--baseline"]
    assert cli.main([*evaluate, "--output", str(tmp_path / "judged"), "options.max_length=64"]) == 0
    judged = json.loads((tmp_path / "judged" / "result.json").read_text())
    assert judged["scores"] == pytest.approx(result["runs"][1]["scores"])
    assert judged["baselines"] == result["baselines"]
    assert "| score (%) | seed-1 | majority |" in capsys.readouterr().out


def test_baselines_alone_need_no_model(tmp_path, capsys):
    data = write_task(tmp_path, "similarity")
    assert cli.main(["evaluate", "similarity", "--baseline", "--data", str(data)]) == 0
    assert "| score (%) | tf-idf cosine |" in capsys.readouterr().out


def test_a_file_of_settings_names_the_task(checkpoint, tmp_path, capsys):  # noqa: F811
    data = write_task(tmp_path, "classification")
    settings = tmp_path / "topic.yaml"
    settings.write_text(f"task: classification\ndata:\n  source: {data}\noptions:\n  max_length: 64\n")
    run = tmp_path / "run"
    shutil.copytree(checkpoint, run / "checkpoint-5")
    seal_checkpoint(run / "checkpoint-5", {"tokens_seen": 1234})
    assert cli.main(["sweep", str(run), str(settings), "--output", str(tmp_path / "sweep"), *SHORT]) == 0
    out = capsys.readouterr().out
    assert "topic" in out
    assert "1,234 tokens  accuracy" in out
    assert cli.main(["finetune", str(settings), f"model.checkpoint={checkpoint}", "--lora", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "task: classification" in printed
    assert "rank: 16" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["finetune", "clasification", "m"], "no task 'clasification'; expected one of classification"),
        (["finetune"], "no task is named; expected one of classification"),
        (
            ["finetune", "similarity", "m", "n"],
            "expected TASK MODEL [CONFIG.yaml] [section.key=value ...], got more: n",
        ),
        (
            ["finetune", "similarity", "m", "training.epoch=1"],
            "unknown setting training.epoch; did you mean training.epochs?",
        ),
        (["finetune", "similarity", "m", "options.stride=1"], "unknown setting options.stride"),
        (["finetune", "similarity", "m", "options.scale=0"], "options.scale is 0.0, expected more than 0"),
        (["finetune", "similarity", "m", "training.seeds=0"], "training.seeds is 0, expected at least 1"),
        (["finetune", "similarity", "m", "--output", "o"], "data.source (--data) is missing"),
        (["evaluate", "seq2seq"], "nothing to evaluate: name a model, ask for the baselines, or both"),
        (["evaluate", "seq2seq", "--baseline", "--data", "no.jsonl"], "there is no file or folder no.jsonl"),
        (["sweep", "run", "topic.yaml", "--output", "o"], "there is no file topic.yaml"),
        (["finetune", "tasks/topics_fr.yaml"], "no file tasks/topics_fr.yaml; did you mean 'tasks/topic_fr.yaml'?"),
        (["finetune", "similarity", "task/topicfr.yml"], "did you mean 'tasks/topic_fr.yaml'?"),
    ],
)
def test_a_user_error_is_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "topic_fr.yaml").touch()
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("fat5: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_help_lists_tasks_and_settings(capsys):
    with pytest.raises(SystemExit):
        cli.main(["finetune", "--help"])
    text = capsys.readouterr().out
    for name in TASKS:
        assert f"  {name} " in text
        assert f"options of {name}" in text
    assert "  optimizer.name  (str, default adamw)" in text  # what finetuning has, not what pretraining has
    assert "  data.columns  (dict[str, str], default {})" in text
    for setting in ("data.columns", "training.patience", "lora.rank", "options.num_beams", "optimizer.lr"):
        assert f"  {setting}  (" in text
