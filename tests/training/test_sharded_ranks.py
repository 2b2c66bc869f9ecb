"""Parameters spread over two processes: the same run as one process makes, and checkpoints for any number of them."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from fat5.errors import ConfigError
from fat5.models import FAT5Config, FAT5ForConditionalGeneration
from fat5.training.pretrain import pretrain
from fat5.training.sharding import resolve_shard_degree, shard_model
from tests.training.test_several_ranks import launch

COMMON = {
    "training__device": "cpu",
    "training__max_steps": 4,
    "training__save_every": 2,
    "training__save_total_limit": 9,
    "training__eval_batches": None,
    "training__max_grad_norm": 0.5,
    "optimizer__weight_decay": 0.1,
    "optimizer__lr": 0.02,
}
NAMES = ("loss", "z_loss", "accuracy", "grad_norm", "learning_rate", "tokens_seen", "eval_loss", "eval_target_tokens")


def history(folder) -> list[dict]:
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


def check_equal(ours, theirs) -> None:
    for name in NAMES:
        got, expected = ([e[name] for e in history(folder) if name in e] for folder in (ours, theirs))
        assert got, name
        assert got == pytest.approx(expected, rel=1e-4), name
    for part in ("", "checkpoint-4"):
        got, expected = (load_file(folder / part / "model.safetensors") for folder in (ours, theirs))
        assert got.keys() == expected.keys()
        for name in got:
            torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-5, msg=name)
    got, expected = (torch.load(folder / "checkpoint-4" / "optimizer.pt")["state"] for folder in (ours, theirs))
    assert got.keys() == expected.keys()
    for index, state in got.items():
        for name, value in state.items():
            torch.testing.assert_close(value, expected[index][name], rtol=1e-3, atol=1e-7, msg=f"{index} {name}")


def error_of(finished) -> str:
    """Return what the processes said, before the launcher's own report."""
    return finished.stderr.split("torch.distributed.elastic")[0][-6000:]


def run_pair(config, path) -> None:
    finished = launch(config, path, 2)
    assert finished.returncode == 0, error_of(finished)


def test_two_sharded_ranks_equal_one_and_one_goes_on_from_their_checkpoint(make_config, tmp_path):
    """The step of AdamWScale is scaled by the RMS of whole tensors, of which a rank has half."""
    pretrain(make_config(**COMMON, training__gradient_accumulation_steps=2))
    pair = make_config(**COMMON, training__data_parallel_shard_degree=-1, training__output_dir=str(tmp_path / "pair"))
    run_pair(pair, tmp_path / "pair.yaml")
    check_equal(tmp_path / "pair", tmp_path / "run")
    # From the middle of the pair's run, alone.
    shutil.rmtree(tmp_path / "pair" / "checkpoint-4")
    for name in ("model.safetensors", "trainer_state.json"):
        (tmp_path / "pair" / name).unlink()
    alone = {"training__gradient_accumulation_steps": 2, "training__output_dir": str(tmp_path / "pair")}
    pretrain(make_config(**COMMON, **alone))
    check_equal(tmp_path / "pair", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"training__data_parallel_shard_degree": -1, "training__gradient_checkpointing": True},
        {"training__data_parallel_shard_degree": -1, "model__tie_word_embeddings": True},
        {"training__data_parallel_shard_degree": -1, "training__compile": True},
        {"training__compile": True, "training__gradient_checkpointing": True},
        {"training__data_parallel_shard_degree": -1, "optimizer__name": "adamw", "optimizer__lr": 1e-3},
    ],
    ids=["checkpointing", "tied", "compiled", "compiled-ddp", "adamw"],
)
def test_variants_of_two_sharded_ranks_equal_one(make_config, tmp_path, changes):
    changes = {**COMMON, **changes}
    alone = {**changes, "training__data_parallel_shard_degree": 1, "training__compile": False}
    pretrain(make_config(**alone, training__gradient_accumulation_steps=2))
    run_pair(make_config(**changes, training__output_dir=str(tmp_path / "pair")), tmp_path / "pair.yaml")
    check_equal(tmp_path / "pair", tmp_path / "run")


@pytest.mark.slow
def test_hybrid_ranks_with_accumulation_equal_one_and_go_on_from_each_other(make_config, tmp_path):
    """Four processes, two copies of the model; then two sharded processes go on from the middle of that run."""
    pretrain(make_config(**COMMON, training__gradient_accumulation_steps=8))
    places = {"training__output_dir": str(tmp_path / "four"), "training__data_parallel_shard_degree": 2}
    half = make_config(**{**COMMON, "training__max_steps": 2}, **places, training__gradient_accumulation_steps=2)
    changed = launch(half, tmp_path / "four.yaml", 4)
    assert changed.returncode == 0, error_of(changed)
    first, whole = ([e["loss"] for e in history(tmp_path / run) if "loss" in e] for run in ("four", "run"))
    assert first == pytest.approx(whole[:2], rel=1e-4)
    run_pair(make_config(**COMMON, **places, training__gradient_accumulation_steps=4), tmp_path / "two.yaml")
    losses = [e["loss"] for e in history(tmp_path / "four") if "loss" in e]
    assert len(losses) == 4


def test_a_degree_that_does_not_divide_the_processes_is_refused(make_config):
    assert [resolve_shard_degree(degree, 8) for degree in (1, 4, 8, -1)] == [1, 4, 8, 8]
    with pytest.raises(ConfigError, match="degree is 3, expected a divisor of the 8 processes"):
        resolve_shard_degree(3, 8)
    with pytest.raises(ConfigError, match="degree is 0, expected 1 or more, or -1"):
        make_config(training__data_parallel_shard_degree=0)


def test_no_layer_keeps_its_weights_whole_between_forward_and_backward():
    """Else gathered weights that were joined for one product would stay until the backward, of all layers at once."""
    sizes = {"vocab_size": 97, "d_model": 24, "d_kv": 16, "d_ff": 40, "num_heads": 2, "num_layers": 2}
    model = FAT5ForConditionalGeneration(FAT5Config(**sizes, dropout_rate=0.0))
    layers = [*model.encoder.block, *model.decoder.block]
    sizes = {parameter.numel() for layer in layers for parameter in layer.parameters()}
    ids = torch.randint(2, 97, (1, 3))
    kept: list[int] = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        shard_model(model, 1, 1, torch.device("cpu"))
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    finally:
        dist.destroy_process_group()
    of_tokens = 3 * 3 * 97  # more than any activation of a layer
    assert [size for size in kept if size > of_tokens and size not in {*sizes, 97 * 24}] == []
    assert all(parameter.grad is not None for parameter in model.parameters())
