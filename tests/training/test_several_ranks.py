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

REPOSITORY = Path(__file__).resolve().parents[2]


def launch(
    config, path: Path, ranks: int, program: tuple[str, ...] = ("fat5", "pretrain")
) -> subprocess.CompletedProcess[str]:
    path.write_text(to_yaml(config))
    return start(ranks, *program, str(path))


def start(ranks: int, *program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", *program]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environment, cwd=REPOSITORY
    )


@pytest.mark.parametrize(
    ("program", "accumulation"),
    [(("fat5", "pretrain"), 1), (("tests.training.replays",), 2)],
    ids=["ddp", "cuda-graphs"],
)
def test_two_ranks_equal_one_with_twice_the_accumulation(make_config, tmp_path, program, accumulation):
    """With CUDA graphs the ranks' gradients are summed from buffers of their own, in the place of DDP."""
    common = {"training__device": "cpu", "training__max_steps": 3, "training__eval_batches": None}
    alone = pretrain(make_config(**common, training__gradient_accumulation_steps=2 * accumulation))
    places = {"training__output_dir": str(tmp_path / "pair"), "training__compile": accumulation == 2}
    pair = make_config(**common, **places, training__gradient_accumulation_steps=accumulation)
    finished = launch(pair, tmp_path / "pair.yaml", 2, program)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "2 x cpu" in finished.stderr
    assert ("replays on a CPU" in finished.stderr) == (accumulation == 2)
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


def test_gradients_of_other_parameters_on_one_rank_are_an_error(tmp_path):
    """Buffers that would mix a step's gradients with those of an earlier step, or update a parameter on one rank."""
    finished = start(2, "tests.training.gradient_sets", str(tmp_path))
    assert finished.returncode == 0, finished.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    both, one = {"a": 3.0, "b": 3.0, "c": 3.0}, {"a": 3.0, "b": None, "c": 3.0}
    for told in (first, second):
        assert told["sums"] == [both, both, one, one, both]
        assert told["looks"] == 3  # once for each new set
    lost = "these parameters have a gradient on some of the 2 ranks alone (on how many is in brackets): b (1), c (1);"
    assert [told["at_first"] for told in (first, second)] == [f"rank {rank}: {lost}" for rank in range(2)]
    # Later the rank tells whose set is a new one: no other looks.
    assert [told["later"] for told in (first, second)] == [f"rank 0: {lost}", None]
