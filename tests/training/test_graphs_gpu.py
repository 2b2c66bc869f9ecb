"""The compiled step as CUDA graphs on a GPU: the run without them, whatever happens between the steps."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from fat5.training.compilation import compile_model
from fat5.training.gradient_buffers import GradientBuffers
from fat5.training.pretrain import pretrain
from tests.training.test_several_ranks import launch
from tests.training.test_step_gpu import SIZES
from tests.training.test_trainer import METADATA, make_trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs an Ampere GPU"
    ),
]

COMMON = {f"model__{name}": value for name, value in SIZES.items()} | {
    "training__compile": True,
    "training__max_steps": 20,
    "training__eval_every": 7,
    "training__eval_at_start": True,
    "training__save_every": 10,
    "training__save_total_limit": 9,
    "denoising__encoder_budget": 2048,
    "schedule__warmup_steps": 2,
}
NEAR = 2e-3
"""Of runs with equal kernels: the embedding's gradient is summed with atomic additions, in no fixed order."""

PADDED = {
    "denoising__layout": "padded",
    "denoising__encoder_budget": None,
    "denoising__batch_size": 16,
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Compile anew, and give back the memory of graphs."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def values(log: list[dict], name: str, since: int = 0) -> list[float]:
    return [entry[name] for entry in log if name in entry and entry["step"] >= since]


def assert_graphs_were_taken() -> None:
    assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] > 0
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"training__gradient_accumulation_steps": 3},
        {"training__gradient_checkpointing": True},
        {"training__precision": "bf16-mixed"},
        {"training__max_grad_norm": 0.0},
        {"optimizer__name": "adamw", "optimizer__lr": 1e-3},
        PADDED,
    ],
    ids=["plain", "accumulation", "checkpointing", "mixed", "no-clipping", "adamw", "padded"],
)
def test_a_run_with_graphs_is_the_one_without(make_config, tmp_path, caplog, changes):
    """Twenty steps with evaluations and checkpoints between them."""
    changes = {**COMMON, **changes}
    with caplog.at_level(logging.INFO):
        graphs = pretrain(make_config(**changes))
    assert "the step replays CUDA graphs" in caplog.text
    assert_graphs_were_taken()
    torch._dynamo.reset()
    places = {"training__output_dir": str(tmp_path / "plain"), "training__compile_mode": "default"}
    plain = pretrain(make_config(**changes, **places))
    losses = values(plain.log_history, "loss")
    assert losses[-1] < losses[0] - 0.1, "the test needs a model that learns"
    for name, tolerance in (("loss", 5e-3), ("eval_loss", 5e-3), ("z_loss", 2e-2), ("grad_norm", 5e-2)):
        ours, theirs = (values(run.log_history, name) for run in (graphs, plain))
        assert len(ours) == (4 if name == "eval_loss" else 20), name
        assert ours == pytest.approx(theirs, rel=tolerance), name
    assert values(graphs.log_history, "tokens_seen") == values(plain.log_history, "tokens_seen")
    timed = [entry["step"] for entry in graphs.log_history if "warm_up_seconds" in entry]
    assert timed == ([1] if "training__gradient_accumulation_steps" in changes else [1, 2])


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_resumed_run_with_graphs_goes_on_as_if_never_stopped(make_config, tmp_path, dropout):
    """The step that goes on is a warm-up, where the unbroken run replays; with dropout both draw the same masks."""
    config = make_config(**COMMON, model__dropout_rate=dropout)
    whole = pretrain(config)
    run = tmp_path / "run"
    shutil.rmtree(run / "checkpoint-20")
    for name in ("model.safetensors", "trainer_state.json"):
        (run / name).unlink()
    torch._dynamo.reset()
    resumed = pretrain(config)
    for name in ("loss", "grad_norm", "eval_loss"):
        ours, theirs = (values(log, name, since=11) for log in (resumed.log_history, whole.log_history))
        assert ours, name
        assert ours == pytest.approx(theirs, rel=NEAR), name


def test_each_replay_draws_its_own_dropout(make_config):
    trainer = make_trainer(make_config(**COMMON, model__dropout_rate=0.2, data__validation=None))
    model = trainer.model.bfloat16().train()
    compile_model(model, "reduce-overhead")
    batch = next(iter(trainer.train_dataset))
    inputs = {
        name: value.cuda() if torch.is_tensor(value) else value for name, value in batch.items() if name not in METADATA
    }
    losses = []
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        loss = model(**inputs).loss
        loss.backward()
        losses.append(loss.item())
        model.zero_grad()
    assert_graphs_were_taken()
    assert len(set(losses)) == 6
    assert max(losses) < min(losses) * 1.2


def test_a_process_under_torchrun_trains_as_one_without(make_config, tmp_path):
    alone = pretrain(make_config(**COMMON))
    config = make_config(**COMMON, training__output_dir=str(tmp_path / "torchrun"))
    finished = launch(config, tmp_path / "torchrun.yaml", 1)
    assert finished.returncode == 0, finished.stderr[-4000:]
    assert "the step replays CUDA graphs" in finished.stderr
    history = json.loads((tmp_path / "torchrun" / "trainer_state.json").read_text())["log_history"]
    for name in ("loss", "eval_loss"):
        assert values(history, name) == pytest.approx(values(alone.log_history, name), rel=NEAR), name


def test_buffers_are_reduced_by_nccl():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        parameters = [nn.Parameter(torch.randn(shape, device="cuda").bfloat16()) for shape in ((300, 7), (13,))]
        buffers = GradientBuffers((str(index), parameter) for index, parameter in enumerate(parameters))
        gradients = [torch.randn_like(parameter) for parameter in parameters]
        for _ in range(2):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            buffers.take()
        buffers.give(reduce=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            assert torch.equal(parameter.grad, 2 * gradient)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_gpus_with_graphs_train_as_one_without(make_config, tmp_path, accumulation):
    """In bf16: each rank's gradient is rounded before the sum, so the runs are near and not equal."""
    plain = {**COMMON, "training__compile_mode": "default"}
    alone = pretrain(make_config(**plain, training__gradient_accumulation_steps=2 * accumulation))
    places = {"training__output_dir": str(tmp_path / "pair"), "training__gradient_accumulation_steps": accumulation}
    finished = launch(make_config(**COMMON, **places), tmp_path / "pair.yaml", 2)
    assert finished.returncode == 0, finished.stderr[-4000:]
    assert "the step replays CUDA graphs" in finished.stderr
    history = json.loads((tmp_path / "pair" / "trainer_state.json").read_text())["log_history"]
    for name, tolerance in (("loss", 1e-2), ("eval_loss", 1e-2), ("grad_norm", 5e-2)):
        assert values(history, name) == pytest.approx(values(alone.log_history, name), rel=tolerance), name
