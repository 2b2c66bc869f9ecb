"""The training step under torch.compile: one graph, no recompilation; and no waiting for the GPU in a step."""

from __future__ import annotations

import logging
import time

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import TrainerCallback

from fat5.errors import ConfigError
from fat5.training.compilation import cache_folder, compile_model
from fat5.training.graph_trainer import GraphTrainer
from fat5.training.pretrain import pretrain
from fat5.training.run_data import open_run_data
from fat5.training.trainer import PretrainTrainer
from tests.training.test_trainer import logged, make_model, make_trainer

COMMON = {"training__max_steps": 4, "training__save_every": 100, "data__validation": None}


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_step_is_one_graph_over_the_batches_of_a_stream(make_config, tmp_path, checkpointing):
    plain = make_trainer(make_config(**COMMON))
    plain.train()
    compiled = make_trainer(make_config(**COMMON, training__output_dir=str(tmp_path / "compiled")))
    if checkpointing:
        compiled.model.gradient_checkpointing_enable()
    torch._dynamo.reset()
    counters.clear()
    compile_model(compiled.model, backend="aot_eager")
    compiled.train()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert not counters["recompiles"]
    batches = [batch for _, batch in zip(range(4), compiled.train_dataset, strict=False)]
    assert len({batch["num_input_tokens"] for batch in batches}) > 1, "the test needs batches that differ"
    assert logged(compiled, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-5)
    assert logged(compiled, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=1e-4)


def test_the_first_step_is_a_warm_up_and_stays_out_of_the_speed(make_config, monkeypatch):
    class SlowStart(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 0:
                time.sleep(1.0)

    trainer = make_trainer(make_config(**{**COMMON, "training__max_steps": 5}, training__log_every=5))
    trainer.add_callback(SlowStart())
    trainer.train()
    first, last = (entry for entry in trainer.state.log_history if "loss" in entry)
    assert first["warm_up_seconds"] > 1.0
    assert "tokens_per_second" not in first
    assert "warm_up_seconds" not in last
    tokens = last["tokens_seen"] - first["tokens_seen"]
    assert last["tokens_per_second"] > tokens / 1.0

    trainer = make_trainer(make_config(**{**COMMON, "training__max_steps": 5}, training__log_every=5))
    trainer.args.logging_first_step = False
    trainer.add_callback(SlowStart())
    trainer.train()
    (only,) = (entry for entry in trainer.state.log_history if "loss" in entry)
    assert only["warm_up_seconds"] > 1.0
    assert only["tokens_per_second"] > tokens / 1.0


def test_a_callback_generates_with_a_compiled_model_as_the_docs_say(make_config):
    config = make_config()
    model = make_model(config, open_run_data(config.data, config.denoising)).eval()
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    ids = torch.randint(3, 600, (2, 12), generator=torch.Generator().manual_seed(0))
    expected = model.generate(ids, **options)
    compile_model(model, backend="aot_eager")
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(model.generate(ids, **options), expected)


@pytest.mark.slow
def test_a_compiled_run_is_the_plain_one_and_says_how_it_is_compiled(make_config, tmp_path, caplog):
    changes = {**COMMON, "training__device": "cpu"}
    plain = pretrain(make_config(**changes))
    with caplog.at_level(logging.INFO):
        compiled = pretrain(
            make_config(**changes, training__compile=True, training__output_dir=str(tmp_path / "compiled"))
        )
    assert "compile_mode=auto: no CUDA graphs, since the model is on the device cpu" in caplog.text
    ours, theirs = ([entry["loss"] for entry in run.log_history if "loss" in entry] for run in (compiled, plain))
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert any(cache_folder().iterdir())


def test_settings_that_contradict_are_refused(make_config):
    with pytest.raises(ConfigError, match="max-autotune without effect"):
        make_config(training__compile_mode="max-autotune")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    ("mode", "accumulation"), [(None, 1), ("default", 1), ("reduce-overhead", 1), ("reduce-overhead", 2)]
)
def test_no_step_waits_for_the_gpu(make_config, mode, accumulation):
    """Steps 3 to 6 run with synchronisation forbidden; the losses are fetched at the log of step 8."""

    class NoWaiting(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            torch.cuda.set_sync_debug_mode("error" if 2 <= state.global_step < 6 else "default")

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step >= 6:
                torch.cuda.set_sync_debug_mode("default")

    # Heads of 16, the smallest that the attention kernels take; plain attention reads the documents' ends on the host.
    changes = {**COMMON, "training__max_steps": 8, "training__num_workers": 1, "model__d_kv": 16}
    changes["training__gradient_accumulation_steps"] = accumulation
    kind = GraphTrainer if mode == "reduce-overhead" else PretrainTrainer
    trainer = make_trainer(make_config(**changes, training__log_every=8), kind=kind)
    if mode is not None:
        compile_model(trainer.model, mode)
    trainer.add_callback(NoWaiting())
    try:
        trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert logged(trainer, "loss")[-1] < 10
