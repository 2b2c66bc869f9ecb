"""Each task trains, is judged, and is loaded again, with a toy model on a CPU."""

from __future__ import annotations

import json
import signal
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, pipeline

from fat5.errors import CheckpointError, ConfigError, FAT5Error
from fat5.optim import ScheduleConfig, build_schedule
from fat5.tasks.evaluate import evaluate
from fat5.tasks.finetune import best_model, finetune
from fat5.tasks.results import read_result
from fat5.tasks.trainer import TimeLimit
from tests.tasks.conftest import ROWS, toy_config, write_task


@pytest.mark.parametrize("task", list(ROWS))
def test_a_task_is_finetuned_and_its_model_scores_the_same_when_loaded_again(task, checkpoint, tmp_path):
    data = write_task(tmp_path, task)
    config = toy_config(
        task,
        data,
        f"model.checkpoint={checkpoint}",
        f"training.output_dir={tmp_path / 'out'}",
        "training.save_model=true",
    )
    result = finetune(config, with_baselines=True)
    assert result.stopped_by is None
    metric = result.summary["metric"]
    assert f"**{metric}**" in result.text
    assert len(result.summary["baselines"]) >= 1
    assert result.summary["data"] | {"source": ""} == {
        "source": "", "train": 24, "validation": 8, "test": 8, "judged_on": "test",
    }  # fmt: skip
    model = best_model(tmp_path / "out")
    again, _ = evaluate(toy_config(task, data, f"model.checkpoint={model}"))
    assert again["scores"] == pytest.approx(result.summary["runs"][0]["scores"])


def test_training_learns_what_the_data_holds(checkpoint, tmp_path):
    data = write_task(tmp_path, "classification", train=160, other=40)
    config = toy_config(
        "classification",
        data,
        f"model.checkpoint={checkpoint}",
        f"training.output_dir={tmp_path / 'out'}",
        "training.epochs=6",
        "optimizer.lr=0.005",
    )
    summary = finetune(config, with_baselines=True).summary
    majority = summary["baselines"]["majority"]["accuracy"]
    assert summary["scores"]["accuracy"]["mean"] > majority + 20


def test_bf16_accumulation_and_recomputed_activations(checkpoint, tmp_path):
    data = write_task(tmp_path, "summarization")
    settings = [f"model.checkpoint={checkpoint}", f"training.output_dir={tmp_path / 'out'}", "training.save_model=true"]
    memory = ["training.gradient_accumulation_steps=2", "training.gradient_checkpointing=true"]
    run = finetune(toy_config("summarization", data, *settings, *memory, "training.precision=bf16")).summary["runs"][0]
    assert run["steps"] == 2  # 24 rows, 8 a batch, 2 batches a step
    weights = load_file(tmp_path / "out" / "seed-0" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_seeds_give_mean_and_spread_and_a_second_call_adds_to_them(checkpoint, tmp_path, monkeypatch):
    data = write_task(tmp_path, "classification")
    settings = [f"model.checkpoint={checkpoint}", f"training.output_dir={tmp_path / 'out'}", "optimizer.lr=0.003"]
    finetune(toy_config("classification", data, *settings, "training.seeds=2"))
    first = (tmp_path / "out" / "seed-0" / "result.json").read_bytes()
    result = finetune(toy_config("classification", data, *settings, "training.seeds=3"))
    assert (tmp_path / "out" / "seed-0" / "result.json").read_bytes() == first
    accuracy = read_result(tmp_path / "out")["scores"]["accuracy"]
    values = accuracy["values"]
    mean = sum(values) / 3
    assert accuracy["mean"] == pytest.approx(mean)
    assert accuracy["spread"] == pytest.approx((sum((value - mean) ** 2 for value in values) / 2) ** 0.5)
    assert "±" in result.text
    with pytest.raises(ConfigError, match=r"holds results of other settings: optimizer\.lr was 0\.003, now 0\.1"):
        finetune(toy_config("classification", data, *settings, "optimizer.lr=0.1"))


def test_label_map_is_saved_in_the_configuration(checkpoint, tmp_path):
    data = write_task(tmp_path, "classification")
    finetune(
        toy_config(
            "classification",
            data,
            f"model.checkpoint={checkpoint}",
            f"training.output_dir={tmp_path / 'out'}",
            "training.save_model=true",
            "model.dropout=0.25",
        )
    )
    config = AutoConfig.from_pretrained(tmp_path / "out" / "seed-0")
    assert (config.dropout_rate, config.classifier_dropout) == (0.25, 0.25)
    classify = pipeline("text-classification", str(tmp_path / "out" / "seed-0"), device="cpu")
    assert classify("Voici le chat.")[0]["label"] in ("animaux", "outils")
    assert config.id2label == {0: "animaux", 1: "outils"}
    assert config.label2id == {"animaux": 0, "outils": 1}


def test_the_best_weights_are_kept_and_training_stops_early(checkpoint, tmp_path):
    """A learning rate that destroys the model after a good start: the good start is what is judged."""
    data = write_task(tmp_path, "classification", train=80, other=24)
    result = finetune(
        toy_config(
            "classification",
            data,
            f"model.checkpoint={checkpoint}",
            f"training.output_dir={tmp_path / 'out'}",
            "training.epochs=50",
            "training.patience=2",
            "training.eval_every=5",
            "optimizer.lr=0.005",
        )
    )
    run = result.summary["runs"][0]
    assert run["steps"] == run["validation"]["step"] + 10
    assert run["steps"] < 500


def test_the_time_limit_ends_training_with_an_evaluation(checkpoint, tmp_path):
    data = write_task(tmp_path, "classification")
    result = finetune(
        toy_config(
            "classification",
            data,
            f"model.checkpoint={checkpoint}",
            f"training.output_dir={tmp_path / 'out'}",
            "training.epochs=1000",
            "training.eval_every=100000",
            "training.max_seconds=0.2",
        )
    )
    run = result.summary["runs"][0]
    assert run["steps"] < 3000
    assert run["validation"]["step"] == run["steps"]


def test_the_learning_rate_ends_with_the_time(monkeypatch):
    """A training that is cut off at its peak loses what the schedule's end would have won."""
    now = [100.0]
    monkeypatch.setattr("fat5.tasks.trainer.time.perf_counter", lambda: now[0])
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    settings = ScheduleConfig(warmup_steps=10)
    schedule = build_schedule(optimizer, settings, 100)
    expected = build_schedule(torch.optim.SGD([torch.zeros(1)], lr=1.0), settings, 100).lr_lambdas[0]
    limit = TimeLimit(20.0)
    limit.hasten(schedule, 100)
    limit.on_train_begin(None, None, None)
    seen = []
    for step in range(1, 7):
        now[0] += (0.125, 0.125, 9.75, 0.125, 0.125, 30.0)[step - 1]
        optimizer.step()
        schedule.step()
        seen.append(schedule.get_last_lr()[0])
    # 1 step in 0.125 of 20 s is ahead of the time; then half of the time is gone, and at last more than all of it.
    assert seen == [expected(place) for place in (1, 2, 50, 50, 51, 100)]
    assert seen[-1] == 0.0


def test_a_signal_ends_the_run_and_the_same_call_goes_on(checkpoint, tmp_path, monkeypatch):
    from fat5.tasks import trainer

    data = write_task(tmp_path, "classification")
    evaluate_as_ever = trainer.TaskTrainer.evaluate

    def interrupted(self, *args, **kwargs):
        if self.args.seed == 1:
            signal.raise_signal(signal.SIGTERM)
        return evaluate_as_ever(self, *args, **kwargs)

    monkeypatch.setattr(trainer.TaskTrainer, "evaluate", interrupted)
    config = toy_config(
        "classification",
        data,
        f"model.checkpoint={checkpoint}",
        f"training.output_dir={tmp_path / 'out'}",
        "training.seeds=2",
        "training.epochs=3",
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    stopped = finetune(config)
    assert list((tmp_path / "temporary").iterdir()) == []
    assert stopped.stopped_by is signal.SIGTERM
    assert [run["seed"] for run in stopped.summary["runs"]] == [0]
    monkeypatch.undo()
    assert [run["seed"] for run in finetune(config).summary["runs"]] == [0, 1]


@pytest.mark.parametrize("log_every", [1, 1000])
def test_a_loss_that_is_not_finite_ends_the_training(checkpoint, tmp_path, log_every):
    data = write_task(tmp_path, "similarity")
    config = toy_config(
        "similarity",
        data,
        f"model.checkpoint={checkpoint}",
        f"training.output_dir={tmp_path / 'out'}",
        f"training.log_every={log_every}",
        "training.max_grad_norm=0",
        "schedule.warmup_steps=0",
        "optimizer.lr=1e30",
        "training.epochs=5",
    )
    with pytest.raises(FAT5Error, match="training has diverged"):
        finetune(config)


def test_a_random_twin_has_the_sizes_but_other_weights(checkpoint, tmp_path):
    data = write_task(tmp_path, "similarity")
    name = "transformer.shared.weight"
    pretrained = load_file(checkpoint / "model.safetensors")["shared.weight"]
    for twin, close in (("false", True), ("true", False)):
        settings = [f"training.output_dir={tmp_path / twin}", f"model.from_scratch={twin}", "training.save_model=true"]
        short = ["training.max_steps=1", "optimizer.lr=1e-9"]
        finetune(toy_config("similarity", data, f"model.checkpoint={checkpoint}", *settings, *short))
        weight = load_file(tmp_path / twin / "seed-0" / "model.safetensors")[name]
        assert weight.shape == pretrained.shape
        assert torch.allclose(weight, pretrained, atol=1e-6) == close


def test_evaluation_needs_a_head_that_was_trained(checkpoint, tmp_path):
    data = write_task(tmp_path, "classification")
    with pytest.raises(CheckpointError, match="has no trained head for classification"):
        evaluate(toy_config("classification", data, f"model.checkpoint={checkpoint}"))
    with pytest.raises(ConfigError, match="nothing to evaluate"):
        evaluate(toy_config("classification", data))


def test_several_processes_are_refused(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="uses one GPU"):
        finetune(toy_config("classification", None, f"training.output_dir={tmp_path}"))


def test_a_folder_of_something_else_is_refused(checkpoint, tmp_path):
    data = write_task(tmp_path, "classification")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("...")
    with pytest.raises(FileExistsError, match="holds no finetuning"):
        finetune(
            toy_config(
                "classification", data, f"model.checkpoint={checkpoint}", f"training.output_dir={tmp_path / 'out'}"
            )
        )


def test_results_are_json_and_a_table(checkpoint, tmp_path):
    data = write_task(tmp_path, "token-classification")
    finetune(
        toy_config(
            "token-classification",
            data,
            f"model.checkpoint={checkpoint}",
            f"training.output_dir={tmp_path / 'out'}",
        )
    )
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert {"f1", "macro_f1", "f1/animal", "f1/outil"} <= result["scores"].keys()
    assert result["runs"][0]["seconds"] > 0
    lines = (tmp_path / "out" / "result.md").read_text().splitlines()
    assert lines[2] == "| score (%) | model |"
    assert not Path(tmp_path / "out" / "seed-0" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "reach"),
    [("token-classification", 95), ("question-answering", 80), ("similarity", 99), ("summarization", 60)],
)
def test_every_task_learns(task, reach, checkpoint, tmp_path):
    """From random weights, in seconds: far beyond what an untrained head gives."""
    data = write_task(tmp_path, task, train=256, other=32)
    settings = [f"model.checkpoint={checkpoint}", f"training.output_dir={tmp_path / 'out'}"]
    longer = ["training.epochs=25", "optimizer.lr=0.01", "training.patience=8"]
    result = finetune(toy_config(task, data, *settings, *longer)).summary
    assert result["scores"][result["metric"]]["mean"] > reach
