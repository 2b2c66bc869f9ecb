"""`fat5 pretrain`: settings, exit codes, and the words at the end."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import yaml

from fat5.cli import main as cli
from fat5.training import pretrain as module
from fat5.training.config import PretrainConfig
from fat5.training.config_file import known_keys
from fat5.training.pretrain import PretrainResult


def test_help_lists_every_setting(capsys):
    with pytest.raises(SystemExit):
        cli.main(["pretrain", "--help"])
    text = capsys.readouterr().out
    assert all(key in text for key in known_keys(PretrainConfig))


def test_print_config_shows_the_merged_settings(capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("training: {output_dir: runs/a, max_steps: 3}\nmodel: {d_model: 64}\n")
    command = ["pretrain", str(path), "data.train=tokens", "model.d_model=128", "optimizer.lr=2e-3", "--print-config"]
    assert cli.main(command) == 0
    merged = yaml.safe_load(capsys.readouterr().out)
    assert (merged["data"]["train"], merged["model"]["d_model"], merged["optimizer"]["lr"]) == ("tokens", 128, 2e-3)
    assert merged["training"]["max_steps"] == 3


@pytest.mark.parametrize(
    ("stopped_by", "code", "words"),
    [
        (None, 0, "done: 9 steps; the model is in runs/a"),
        (
            signal.SIGTERM,
            143,
            "stopped by SIGTERM after step 9 of 20; saved runs/a/checkpoint-9. The same `fat5 pretrain`",
        ),
        (signal.SIGINT, 130, "stopped by SIGINT after step 9 of 20"),
    ],
)
def test_the_end_is_told_in_words_and_in_the_exit_code(stopped_by, code, words, capsys, monkeypatch):
    folder = Path("runs/a")
    result = PretrainResult(folder, 9, 20, [], folder / "checkpoint-9", stopped_by)
    given = []
    monkeypatch.setattr(module, "pretrain", lambda config: given.append(config) or result)
    assert cli.main(["pretrain", "data.train=t", "training.output_dir=runs/a", "training.max_steps=20"]) == code
    assert words in capsys.readouterr().out
    assert given[0].training.max_steps == 20
