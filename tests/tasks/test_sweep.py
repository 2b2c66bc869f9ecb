"""A sweep over the checkpoints of a pretraining run."""

from __future__ import annotations

import json
import shutil

import pytest

from fat5.errors import CheckpointError, ConfigError
from fat5.tasks.sweep import sweep
from fat5.training.checkpoints import seal_checkpoint
from tests.tasks.conftest import toy_config, write_task


@pytest.fixture
def run(checkpoint, tmp_path):
    """A run with two checkpoints, as `fat5 pretrain` leaves them."""
    for step, tokens in ((10, 5_000), (20, 10_000)):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        shutil.copytree(checkpoint, folder)
        seal_checkpoint(folder, {"step": step, "tokens_seen": tokens})
    return tmp_path / "run"


def test_a_point_for_each_checkpoint_and_task_and_a_figure(run, tmp_path):
    names = ("classification", "similarity")
    configs = {name: toy_config(name, write_task(tmp_path, name), "training.max_steps=2") for name in names}
    result = sweep(run, configs, tmp_path / "sweep")
    expected = [(step, tokens, name) for step, tokens in ((10, 5_000), (20, 10_000)) for name in names]
    points = json.loads((tmp_path / "sweep" / "result.json").read_text())["points"]
    assert points == result.points
    assert [(int(p["checkpoint"].split("-")[1]), p["tokens_seen"], p["task"]) for p in points] == expected
    assert {p["metric"] for p in points} == {"accuracy", "average_precision"}
    assert (tmp_path / "sweep" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    # A second call trains nothing and finds the same.
    time_of = (tmp_path / "sweep" / "similarity" / "checkpoint-20" / "seed-0" / "result.json").stat().st_mtime_ns
    assert sweep(run, configs, tmp_path / "sweep").points == points
    again = (tmp_path / "sweep" / "similarity" / "checkpoint-20" / "seed-0" / "result.json").stat().st_mtime_ns
    assert again == time_of


def test_what_cannot_be_swept(run, tmp_path):
    config = toy_config("classification", write_task(tmp_path, "classification"))
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        sweep(tmp_path, {"topic": config}, tmp_path / "sweep")
    with pytest.raises(ConfigError, match="needs the settings of at least one task"):
        sweep(run, {}, tmp_path / "sweep")
    (run / "checkpoint-20" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json has 2 bytes"):
        sweep(run, {"topic": config}, tmp_path / "sweep")
