"""Training from a T5 checkpoint: its weights, all their digits, and nothing that does not fit."""

from __future__ import annotations

import json
import socket
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import T5Config, T5ForConditionalGeneration

from fat5.data.tokenizer import load_tokenizer
from fat5.errors import CheckpointError, ConfigError
from fat5.models import FAT5ForConditionalGeneration
from fat5.optim import AdamWScale
from fat5.training.initial_weights import keep_rounding_errors
from fat5.training.pretrain import pretrain

SIZES = {"d_model": 48, "d_kv": 12, "d_ff": 64, "num_layers": 1, "num_decoder_layers": 2, "num_heads": 3}
OURS = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_heads": 8}  # the defaults: no wish


@pytest.fixture
def t5_folder(toy, tmp_path):
    """A random T5 v1.1 as Transformers saves it, its configuration as the files of FLAN-T5 have it."""
    config = T5Config(
        vocab_size=704, feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0, **SIZES
    )
    torch.manual_seed(5)
    model = T5ForConditionalGeneration(config)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) / 7)
    model.config.tie_word_embeddings = False
    folder = tmp_path / "t5"
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"tie_word_embeddings": False}))
    return folder


@pytest.fixture
def started(make_config, t5_folder):
    """Return a function from changes to the settings of a run that starts from it."""
    common = {f"model__{name}": value for name, value in OURS.items()}
    common |= {"training__max_steps": 2, "data__validation": None, "training__device": "cpu"}
    return lambda **changes: make_config(**{**common, "training__init_from": str(t5_folder), **changes})


def test_training_starts_from_the_weights_of_a_t5(started, t5_folder, tmp_path):
    run = pretrain(started(optimizer__lr=1e-12, model__z_loss=0.0, training__max_steps=1))
    source = load_file(t5_folder / "model.safetensors")
    saved = load_file(run.output_dir / "model.safetensors")
    assert source.keys() == saved.keys()
    for name, value in source.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-6, atol=1e-7, msg=name)
    first = next(entry["loss"] for entry in run.log_history if "loss" in entry)
    assert first > 5
    changed = pretrain(
        started(training__output_dir=str(tmp_path / "other"), optimizer__lr=0.05, model__kernel_backend="torch")
    )
    losses = [entry["loss"] for entry in changed.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(first, rel=1e-2)
    assert losses[1] != losses[0]


def test_the_runs_own_dropout_and_losses_are_used(started):
    run = pretrain(started(model__dropout_rate=0.2, model__z_loss=0.01))
    model = FAT5ForConditionalGeneration.from_pretrained(run.output_dir)
    assert (model.config.dropout_rate, model.config.z_loss) == (0.2, 0.01)
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.2}
    assert next(entry["z_loss"] for entry in run.log_history if "loss" in entry) > 0.01


def test_bf16_training_keeps_the_digits_of_fp32_weights():
    torch.manual_seed(0)
    exact = torch.randn(64, 64)

    class One(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(exact.bfloat16())

    model = One()
    optimizer = AdamWScale(model.parameters(), lr=0.0)
    keep_rounding_errors({"weight": exact}, model, optimizer)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    kept = model.weight.float() + optimizer.state[model.weight]["compensation"].float()
    rounded = (exact.bfloat16().float() - exact).abs().max()
    assert (kept - exact).abs().max() < rounded / 100
    assert rounded > 1e-3


def test_a_bf16_run_starts_with_the_compensation(started, t5_folder):
    run = pretrain(started(training__precision="bf16", optimizer__lr=1e-12, training__max_steps=1))
    state = torch.load(run.checkpoint / "optimizer.pt")["state"]
    assert any(entry["compensation"].abs().max() > 0 for entry in state.values())
    saved = load_file(run.output_dir / "model.safetensors")
    source = load_file(t5_folder / "model.safetensors")
    for name, value in saved.items():
        torch.testing.assert_close(value, source[name].bfloat16(), msg=name)


def lose(folder, name: str) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model__d_model": 32}, ConfigError, "model.d_model is 32, the checkpoint's 48"),
        ({"model__num_layers": 3}, ConfigError, "model.num_layers is 3, the checkpoint's 1"),
        ({"training__init_from": "nowhere/at/all"}, CheckpointError, "init_from is 'nowhere/at/all'"),
        ({"training__init_from": ""}, ConfigError, "init_from is empty"),
    ],
)
def test_what_does_not_agree_is_refused(started, tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        pretrain(started(**changes))
    assert not (tmp_path / "run").exists()


def test_a_mistyped_folder_is_refused_at_once_without_a_network(started, t5_folder, monkeypatch):
    def unreachable(*_):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.chdir(t5_folder.parent)
    monkeypatch.setattr("socket.getaddrinfo", unreachable)
    monkeypatch.setattr("fat5.data.hub.getproxies", dict)
    typo = f"{t5_folder.name}s"
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=rf"is '{typo}'; did you mean '{t5_folder.name}'\?"):
        pretrain(started(training__init_from=typo))
    assert time.monotonic() - began < 10  # the hub's client waits for 23 seconds


def test_a_checkpoint_that_lacks_a_weight_is_refused(started, t5_folder):
    lose(t5_folder, "decoder.block.1.layer.1.EncDecAttention.k.weight")
    with pytest.raises(CheckpointError, match=r"EncDecAttention\.k\.weight"):
        pretrain(started())


def test_a_checkpoint_with_too_few_embeddings_is_refused(started, t5_folder, toy):
    weights = load_file(t5_folder / "model.safetensors")
    for name in weights:
        if weights[name].shape[0] == 704:
            weights[name] = weights[name][:600].clone()
    save_file(weights, t5_folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((t5_folder / "config.json").read_text())
    (t5_folder / "config.json").write_text(json.dumps(written | {"vocab_size": 600}))
    assert len(load_tokenizer(toy.tokenizer)) == 640
    with pytest.raises(ConfigError, match="600 embeddings, the tokenizer 640 tokens"):
        pretrain(started())
