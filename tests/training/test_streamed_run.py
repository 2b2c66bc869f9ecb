"""Training on a stream: the settings, the logs, and going on bit for bit after any end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fat5.errors import CheckpointError, ConfigError
from fat5.training.checkpoints import list_checkpoints, seal_checkpoint, verify_checkpoint
from fat5.training.config_file import to_yaml
from fat5.training.pretrain import pretrain
from tests.training.test_resume import assert_same_run, stop_at, training_log  # noqa: F401
from tests.training.test_several_ranks import launch

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture
def streamed(toy, make_config):
    """Return a function from `section__key=value` to the settings of a toy run on a stream."""
    sources = [{"source": [str(toy.text)], "weight": 2.0}, {"source": ["fat5:sample"]}]

    def make(**changes: Any):
        stream = {"sources": sources, "shuffle_buffer": 20}
        settings = {"data__train": None, "data__tokenizer": str(toy.tokenizer), "data__stream": stream}
        return make_config(**{**settings, "model__dropout_rate": 0.1, **changes})

    return make


@pytest.mark.parametrize("changes", [{}, {"training__num_workers": 2, "training__gradient_accumulation_steps": 2}])
def test_a_stopped_run_on_a_stream_goes_on_bit_for_bit(streamed, tmp_path, stop_at, changes):  # noqa: F811
    """Pitfall: after a resume in the middle of an epoch the data starts over."""
    changes = {**changes, "training__max_steps": 7}
    unbroken = pretrain(streamed(**changes, training__output_dir=str(tmp_path / "unbroken")))
    stop_at(4, signal.SIGTERM)
    stopped = pretrain(streamed(**changes))
    assert (stopped.step, stopped.checkpoint.name) == (4, "checkpoint-4")
    resumed = pretrain(streamed(**changes))
    assert training_log(resumed).keys() == set(range(1, 8))
    assert_same_run(resumed, unbroken)
    losses = [entry["loss"] for entry in training_log(resumed).values()]
    assert len(set(losses)) == 7


KILLED_RUN = """
import os, signal, sys, torch
from fat5.training import trainer
from fat5.training.config import PretrainConfig
from fat5.training.config_file import load_settings
from fat5.training.pretrain import pretrain
original = trainer.PretrainTrainer.training_step
def training_step(self, *args, **kwargs):
    if self.state.global_step == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, *args, **kwargs)
trainer.PretrainTrainer.training_step = training_step
torch.set_num_threads(1)
pretrain(load_settings(PretrainConfig, sys.argv[1]))
"""


def test_a_killed_run_on_a_stream_goes_on_bit_for_bit(streamed, tmp_path):
    changes = {"training__max_steps": 8, "training__num_workers": 1, "data__validation": None}
    unbroken = pretrain(streamed(**changes, training__output_dir=str(tmp_path / "unbroken")))
    config = streamed(**changes)
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    command = [sys.executable, "-c", KILLED_RUN, str(tmp_path / "run.yaml"), "5"]
    finished = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert finished.returncode == -signal.SIGKILL, finished.stderr.decode()
    assert [path.name for path in list_checkpoints(config.training.output_dir)] == ["checkpoint-3"]
    resumed = pretrain(config)
    assert training_log(resumed) == training_log(unbroken)


def test_the_logs_tell_fill_and_tokens_but_no_epoch(streamed):
    entries = list(training_log(pretrain(streamed(training__max_steps=4))).values())
    for entry in entries:
        assert 0.3 < entry["fill"] <= 1
        assert entry["skipped_tokens"] >= 0
        assert "epoch" not in entry
    assert entries[-1]["tokens_seen"] > 3 * entries[0]["tokens_seen"]


def test_a_stream_that_is_not_the_checkpoints_is_refused(streamed, toy):
    settings = {"training__num_workers": 1, "data__validation": None, "training__max_steps": 3}
    run = pretrain(streamed(**settings))
    settings["training__max_steps"] = 6
    with pytest.raises(ConfigError, match="number of data workers was 1, now 2"):
        pretrain(streamed(**{**settings, "training__num_workers": 2}))
    other = {"sources": [{"source": [str(toy.text)]}], "shuffle_buffer": 20}
    with pytest.raises(ConfigError, match=r"data\.stream\.sources was"):
        pretrain(streamed(**settings, data__stream=other))
    with pytest.raises(ConfigError, match=r"data\.stream.* was|the training data was"):
        pretrain(streamed(**settings, data__stream=None, data__train=str(toy.train)))

    facts = verify_checkpoint(run.checkpoint)
    facts.pop("files")
    path = run.checkpoint / "data_state_0.pt"
    state = torch.load(path, weights_only=True)
    torch.save({**state, "batches": 2}, path)
    seal_checkpoint(run.checkpoint, facts)
    with pytest.raises(CheckpointError, match=r"data_state_0\.pt stands behind batch 2, expected batch 3"):
        pretrain(streamed(**settings))
    path.unlink()
    seal_checkpoint(run.checkpoint, facts)
    with pytest.raises(CheckpointError, match=r"has no data_state_0\.pt"):
        pretrain(streamed(**settings))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__stream": None}, r"one of train .* and stream .*, got neither"),
        ({"data__train": "tokens"}, r"one of train .* and stream .*, got both"),
        ({"data__tokenizer": None, "data__validation": None}, "a stream has none beside it"),
        ({"data__stream": {"sources": [{"source": ["none.jsonl"]}]}}, r"none\.jsonl does not exist"),
        ({"data__stream": {"sources": []}}, "at least one source"),
        ({"data__stream": {"sources": [{"sources": ["a"]}]}}, r"unknown setting .*sources\[0\].*did you mean"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_any_work(streamed, tmp_path, changes, message):
    with pytest.raises((ConfigError, FileNotFoundError), match=message):
        pretrain(streamed(**changes))
    assert not (tmp_path / "run").exists(), "work was started before the check"


@pytest.mark.slow
def test_two_ranks_share_a_stream_and_go_on_together(streamed, tmp_path):
    changes = {"training__device": "cpu", "data__validation": None, "training__num_workers": 1}
    # The first half runs as a run of 3 steps, so the rate must not hang on the number of steps.
    changes["schedule__name"] = "constant"
    whole = streamed(**changes, training__max_steps=6, training__output_dir=str(tmp_path / "whole"))
    for config in (whole, streamed(**changes, training__max_steps=3), streamed(**changes, training__max_steps=6)):
        finished = launch(config, tmp_path / "pair.yaml", 2)
        assert finished.returncode == 0, finished.stderr[-3000:]
    names = {path.name for path in (tmp_path / "run" / "checkpoint-6").glob("data_state_*")}
    assert names == {"data_state_0.pt", "data_state_1.pt"}
    ours, theirs = (
        [
            [entry[name] for name in ("loss", "grad_norm", "tokens_seen", "fill", "skipped_tokens")]
            for entry in json.loads(Path(tmp_path / run / "trainer_state.json").read_text())["log_history"]
            if "loss" in entry
        ]
        for run in ("run", "whole")
    )
    assert len(ours) == 6
    assert ours == theirs
