"""Stopping and going on: bit for bit the run that was never stopped, and nothing half-written is trusted."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fat5.errors import CheckpointError, ConfigError
from fat5.models import FAT5Config, FAT5ForConditionalGeneration
from fat5.training import trainer as trainer_module
from fat5.training.checkpoints import MANIFEST, STAGING, list_checkpoints, seal_checkpoint, verify_checkpoint
from fat5.training.config import PretrainConfig
from fat5.training.config_file import build_settings, load_settings, to_yaml
from fat5.training.pretrain import PretrainResult, pretrain
from fat5.training.resume import check_weights
from tests.training.conftest import toy_settings

DROPOUT = {"model__dropout_rate": 0.1}
CLOCK = ("tokens_per_second", "warm_up_seconds")


def training_log(result: PretrainResult) -> dict[int, dict[str, Any]]:
    """Return the training logs by step, without the clock."""
    return {
        entry["step"]: {
            name: value for name, value in entry.items() if name not in ("tokens_per_second", "warm_up_seconds")
        }
        for entry in result.log_history
        if "loss" in entry
    }


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_run(ours: PretrainResult, theirs: PretrainResult) -> None:
    assert training_log(ours) == training_log(theirs)
    assert ours.evaluation["eval_loss"] == theirs.evaluation["eval_loss"]
    expected = weights(theirs.output_dir)
    for name, value in weights(ours.output_dir).items():
        assert torch.equal(value, expected[name]), name


@pytest.fixture
def stop_at(monkeypatch):
    """Return a function that makes this process get a signal in the middle of one training step."""

    def arrange(step: int, number: signal.Signals) -> None:
        original = trainer_module.PretrainTrainer.training_step

        def training_step(self, *args, **kwargs):
            if self.state.global_step + 1 == step:
                monkeypatch.setattr(trainer_module.PretrainTrainer, "training_step", original)
                os.kill(os.getpid(), number)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(trainer_module.PretrainTrainer, "training_step", training_step)

    return arrange


@pytest.mark.parametrize(
    ("number", "precision", "changes"),
    [
        (signal.SIGTERM, "fp32", {"training__gradient_accumulation_steps": 2, "training__num_workers": 1}),
        (signal.SIGINT, "bf16", {}),
    ],
)
def test_a_stopped_run_goes_on_bit_for_bit(make_config, tmp_path, stop_at, number, precision, changes):
    """Pitfalls: after a mid-epoch resume the data starts over; loading casts optimiser state to the parameter type."""
    settings = {**DROPOUT, **changes, "training__max_steps": 7, "training__precision": precision}
    unbroken = pretrain(make_config(**settings, training__output_dir=str(tmp_path / "unbroken")))
    assert (unbroken.step, unbroken.stopped_by) == (7, None)

    before = signal.getsignal(number)
    stop_at(4, number)
    stopped = pretrain(make_config(**settings))
    assert (stopped.step, stopped.stopped_by, stopped.checkpoint.name) == (4, number, "checkpoint-4")
    assert signal.getsignal(number) is before
    assert not (stopped.output_dir / "model.safetensors").exists(), "a stopped run has no final model"

    resumed = pretrain(make_config(**settings))
    assert (resumed.step, resumed.stopped_by) == (7, None)
    assert training_log(resumed).keys() == set(range(1, 8))
    assert_same_run(resumed, unbroken)


def test_logs_after_a_resume_do_not_depend_on_where_it_stopped(make_config, tmp_path, monkeypatch):
    """The log interval does not divide the save interval: a checkpoint closes the window."""
    settings = {"training__max_steps": 8, "training__log_every": 5, "data__validation": None}
    unbroken = pretrain(make_config(**settings, training__output_dir=str(tmp_path / "unbroken")))

    def crash(self, *args, **kwargs):
        if self.state.global_step == 7:
            raise RuntimeError("the machine is gone")
        return original(self, *args, **kwargs)

    original = trainer_module.PretrainTrainer.training_step
    monkeypatch.setattr(trainer_module.PretrainTrainer, "training_step", crash)
    with pytest.raises(RuntimeError, match="the machine is gone"):
        pretrain(make_config(**settings))
    monkeypatch.undo()
    resumed = pretrain(make_config(**settings))
    assert list(training_log(resumed)) == [1, 3, 5, 6, 8]
    assert training_log(resumed) == training_log(unbroken)


def fail_on_optimizer_state(monkeypatch, failure: BaseException) -> None:
    original = torch.save

    def save(value, path, *args, **kwargs):
        if Path(path).name == "optimizer.pt" and "checkpoint-6" in str(path):
            Path(path).write_bytes(b"half")
            raise failure
        return original(value, path, *args, **kwargs)

    monkeypatch.setattr(torch, "save", save)


def test_a_full_disk_is_one_error_and_leaves_the_last_checkpoint(make_config, monkeypatch):
    unbroken = pretrain(make_config(**DROPOUT))
    shutil.rmtree(unbroken.output_dir)
    with monkeypatch.context() as patch:
        fail_on_optimizer_state(patch, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        with pytest.raises(CheckpointError, match=r"checkpoint-6 could not be saved.*No space left") as error:
            pretrain(make_config(**DROPOUT))
    assert "the last whole checkpoint is" in str(error.value)
    assert [path.name for path in list_checkpoints(unbroken.output_dir)] == ["checkpoint-3"]
    assert not (unbroken.output_dir / STAGING).exists()
    assert training_log(pretrain(make_config(**DROPOUT))) == training_log(unbroken)


KILLED_RUN = """
import os, signal, sys, torch
from pathlib import Path
from fat5.training.config import PretrainConfig
from fat5.training.config_file import load_settings
from fat5.training.pretrain import pretrain
original = torch.save
def save(value, path, *args, **kwargs):
    if Path(path).name == "optimizer.pt" and "checkpoint-6" in str(path):
        Path(path).write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    return original(value, path, *args, **kwargs)
torch.save = save
torch.set_num_threads(1)
pretrain(load_settings(PretrainConfig, sys.argv[1]))
"""


def test_a_kill_in_the_middle_of_a_save_leaves_nothing_to_trust(make_config, tmp_path):
    config = make_config(data__validation=None)
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    command = [sys.executable, "-c", KILLED_RUN, str(tmp_path / "run.yaml")]
    finished = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert finished.returncode == -signal.SIGKILL, finished.stderr.decode()
    run = Path(config.training.output_dir)
    assert (run / STAGING / "checkpoint-6" / "optimizer.pt").read_bytes() == b"half"
    assert [path.name for path in list_checkpoints(run)] == ["checkpoint-3"]
    resumed = pretrain(config)
    assert (resumed.step, resumed.checkpoint.name) == (6, "checkpoint-6")
    assert not (run / STAGING).exists()
    verify_checkpoint(resumed.checkpoint)


@pytest.fixture(scope="module")
def finished_run(toy, tmp_path_factory) -> PretrainResult:
    values = toy_settings(toy, tmp_path_factory.mktemp("finished") / "run", data__validation=None)
    return pretrain(build_settings(PretrainConfig, values))


@pytest.fixture
def run_with_two_checkpoints(finished_run, tmp_path) -> PretrainResult:
    """A copy of one finished run, at the place where `make_config` looks."""
    copy = shutil.copytree(finished_run.output_dir, tmp_path / "run")
    return dataclasses.replace(finished_run, output_dir=copy, checkpoint=copy / finished_run.checkpoint.name)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 7)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("damage", "file", "message"),
    [
        (truncate, "optimizer.pt", r"optimizer.pt has \d+ bytes, expected \d+"),
        (flip_a_bit, "model.safetensors", "content of model.safetensors has changed"),
        (Path.unlink, "rng_state.pth", "rng_state.pth is missing"),
        (Path.unlink, MANIFEST, "has no checkpoint_manifest.json"),
        (truncate, MANIFEST, "checkpoint_manifest.json is damaged"),
    ],
)
def test_a_damaged_checkpoint_is_named_with_the_one_before_it(
    run_with_two_checkpoints, make_config, damage, file, message
):
    last = run_with_two_checkpoints.checkpoint
    damage(last / file)
    longer = make_config(data__validation=None, training__max_steps=8)
    with pytest.raises(CheckpointError, match=message) as error:
        pretrain(longer)
    assert str(last) in str(error.value)
    assert f"remove it to go on from {last.with_name('checkpoint-3')}" in str(error.value)
    shutil.rmtree(last)
    assert pretrain(longer).step == 8


def test_old_checkpoints_give_way(make_config):
    run = pretrain(
        make_config(data__validation=None, training__save_every=1, training__save_total_limit=2, training__max_steps=4)
    )
    assert [path.name for path in list_checkpoints(run.output_dir)] == ["checkpoint-3", "checkpoint-4"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__d_model": 64}, "model.d_model was 32, now 64"),
        ({"optimizer__lr": 0.5}, "optimizer.lr was None, now 0.5"),
        ({"denoising__seed": 3}, "denoising.seed was 0, now 3"),
        ({"training__precision": "bf16"}, "training.precision was 'fp32', now 'bf16'"),
        ({"training__gradient_accumulation_steps": 2}, r"gradient_accumulation_steps was 1, now 2"),
        ({"training__resume": False}, "holds checkpoint-6 of an earlier run and training.resume is false"),
        ({"training__resume": "nowhere"}, "training.resume names nowhere, which does not exist; the newest"),
        ({"training__resume": "OLDER"}, "holds checkpoint-6, which is newer"),
    ],
)
def test_a_run_that_does_not_fit_its_checkpoint_is_refused(run_with_two_checkpoints, make_config, changes, message):
    run = run_with_two_checkpoints
    if changes.get("training__resume") == "OLDER":
        changes = {"training__resume": str(run.output_dir / "checkpoint-3")}
    with pytest.raises((ConfigError, CheckpointError, FileExistsError), match=message):
        pretrain(make_config(data__validation=None, training__max_steps=8, **changes))


def test_a_run_on_other_text_is_refused(run_with_two_checkpoints, make_config, toy):
    with pytest.raises(ConfigError, match="the training data was"):
        pretrain(make_config(data__validation=None, data__train=str(toy.validation), training__max_steps=8))


def test_a_complete_run_is_left_alone(run_with_two_checkpoints, make_config, caplog):
    run = run_with_two_checkpoints
    stamp = (run.output_dir / "model.safetensors").stat().st_mtime_ns
    again = pretrain(make_config(data__validation=None, training__log_every=2))
    assert (again.step, again.checkpoint) == (6, run.checkpoint)
    assert training_log(again) == training_log(run)
    assert "is at step 6 of 6: nothing to do" in caplog.text
    assert (run.output_dir / "model.safetensors").stat().st_mtime_ns == stamp


def test_the_result_loads_as_a_pretrained_model(run_with_two_checkpoints, make_config):
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    run = run_with_two_checkpoints
    model = AutoModelForSeq2SeqLM.from_pretrained(run.output_dir)
    assert type(model) is FAT5ForConditionalGeneration
    tokenizer = AutoTokenizer.from_pretrained(run.output_dir)
    assert (model.config.pad_token_id, model.config.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    # The Trainer's own default would switch caches off for good.
    assert json.loads((run.output_dir / "config.json").read_text()).get("use_cache", True)
    last = weights(run.checkpoint)
    assert all(torch.equal(value, last[name]) for name, value in weights(run.output_dir).items())
    saved = load_settings(PretrainConfig, run.output_dir / "pretrain.yaml")
    assert saved.model == make_config().model
    assert saved.denoising == make_config().denoising
    assert (run.output_dir / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_whole_checkpoint_of_another_model_is_refused(run_with_two_checkpoints, make_config):
    last = run_with_two_checkpoints.checkpoint
    facts = verify_checkpoint(last)
    facts.pop("files")
    path = last / "model.safetensors"
    save_file({**load_file(path), "decoder.extra.weight": torch.zeros(2)}, path)
    seal_checkpoint(last, facts)
    with pytest.raises(CheckpointError, match=r"do not fit the model: unexpected decoder\.extra\.weight"):
        pretrain(make_config(data__validation=None, training__max_steps=8))


def test_weights_must_fit_the_model_one_by_one(tmp_path):
    """Pitfall: weights skipped with only a warning."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = FAT5ForConditionalGeneration(FAT5Config(**sizes))
    model.save_pretrained(tmp_path)
    check_weights(tmp_path, model)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    name = "encoder.block.0.layer.0.SelfAttention.q.weight"
    for change, message in [
        ({name: None}, f"missing {name}"),
        ({"extra": torch.zeros(1)}, "unexpected extra"),
        ({name: torch.zeros(3, 16)}, r"q.weight is \[3, 16\], expected \[8, 16\]"),
    ]:
        save_file({key: value for key, value in {**whole, **change}.items() if value is not None}, path)
        with pytest.raises(CheckpointError, match=message):
            check_weights(tmp_path, model)
    tied = FAT5ForConditionalGeneration(FAT5Config(**sizes, tie_word_embeddings=True))
    tied.save_pretrained(tmp_path)
    check_weights(tmp_path, tied)
    with pytest.raises(CheckpointError, match=r"missing lm_head\.weight"):
        check_weights(tmp_path, model)
