"""The training step on GPUs: where its time goes, and two GPUs against one."""

from __future__ import annotations

import json

import pytest
import torch

from fat5.training.pretrain import pretrain
from fat5.training.profiling import TRACE_NAME, profile_of, read_kernels
from tests.training.test_several_ranks import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

SIZES = {"d_model": 256, "d_kv": 64, "d_ff": 512, "num_layers": 2, "num_heads": 4}
COMMON = {f"model__{name}": value for name, value in SIZES.items()} | {"data__validation": None}


@pytest.mark.parametrize("compiled", [False, True])
def test_profile_finds_matrix_products_and_attention(make_config, tmp_path, compiled):
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs an Ampere GPU")
    changes = {"training__max_steps": 10, "training__profile": 3, "training__compile": compiled}
    pretrain(make_config(**COMMON, **changes, denoising__encoder_budget=8192))
    profile = profile_of(read_kernels(tmp_path / "run" / TRACE_NAME))
    assert sum(profile.shares.values()) == pytest.approx(1)
    for kind in ("gemm", "attention", "memory-bound"):
        assert profile.shares[kind] > 0.005, kind
    assert profile.milliseconds > 0


def test_the_first_step_is_not_in_the_speed_of_a_compiled_run(make_config):
    run = pretrain(make_config(**COMMON, training__max_steps=20, training__log_every=10, training__compile=True))
    first, *rest = (entry for entry in run.log_history if "loss" in entry)
    assert first["warm_up_seconds"] > 1
    for entry in rest:
        assert entry["tokens_per_second"] > 100 * first["tokens_seen"] / first["warm_up_seconds"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("degree", [1, -1])
@pytest.mark.parametrize("compiled", [False, True])
def test_two_gpus_train_as_one(make_config, tmp_path, degree, compiled):
    changes = {**COMMON, "training__max_steps": 5, "training__precision": "fp32"}
    alone = pretrain(make_config(**changes, training__gradient_accumulation_steps=2))
    changes |= {"training__data_parallel_shard_degree": degree, "training__compile": compiled}
    finished = launch(make_config(**changes, training__output_dir=str(tmp_path / "pair")), tmp_path / "pair.yaml", 2)
    assert finished.returncode == 0, finished.stderr[-4000:]
    history = json.loads((tmp_path / "pair" / "trainer_state.json").read_text())["log_history"]
    for name in ("loss", "grad_norm"):
        ours, theirs = ([entry[name] for entry in log if name in entry] for log in (history, alone.log_history))
        assert ours == pytest.approx(theirs, rel=1e-3), name
