"""Two processes on the CPU do together what one does alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fat5.training.config_file import to_yaml
from fat5.training.pretrain import pretrain


def launch(config, path: Path, ranks: int) -> subprocess.CompletedProcess[str]:
    path.write_text(to_yaml(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "fat5", "pretrain", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


def test_two_ranks_equal_one_with_twice_the_accumulation(make_config, tmp_path):
    common = {"training__device": "cpu", "training__max_steps": 3, "training__eval_batches": None}
    alone = pretrain(make_config(**common, training__gradient_accumulation_steps=2))
    pair = make_config(**common, training__output_dir=str(tmp_path / "pair"))
    finished = launch(pair, tmp_path / "pair.yaml", 2)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "2 x cpu" in finished.stderr
    history = json.loads((tmp_path / "pair" / "trainer_state.json").read_text())["log_history"]
    names = ("loss", "z_loss", "accuracy", "grad_norm", "learning_rate", "tokens_seen", "epoch", "eval_loss")
    names += ("eval_accuracy_text", "eval_target_tokens")
    for name in names:
        ours = [entry[name] for entry in history if name in entry]
        theirs = [entry[name] for entry in alone.log_history if name in entry]
        assert ours, name
        assert ours == pytest.approx(theirs, rel=1e-4), name
    checkpoint = tmp_path / "pair" / "checkpoint-3"
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (checkpoint, alone.checkpoint))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert {path.name for path in checkpoint.glob("rng_state_*")} == {"rng_state_0.pth", "rng_state_1.pth"}
