"""Models of other kinds judged by the same code, adapters, energy, and what does not fit."""

from __future__ import annotations

import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    CamembertConfig,
    CamembertForTokenClassification,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from fat5.data.tokenizer import save_tokenizer
from fat5.errors import CheckpointError, ConfigError
from fat5.tasks import energy
from fat5.tasks.evaluate import evaluate
from fat5.tasks.finetune import finetune
from fat5.tasks.models import load_task_model
from fat5.tasks.registry import task_class
from fat5.tasks.settings import ModelSettings
from fat5.training.accounts import Energy
from tests.data.small_tokenizer import small_tokenizer
from tests.tasks.conftest import toy_config, write_task

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}


def encoder_folder(path, cls, config_cls, **settings):
    """Save a stock encoder with our toy tokenizer."""
    tokenizer = small_tokenizer()
    save_tokenizer(tokenizer, path)
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "max_position_embeddings": 80}
    cls(config_cls(**sizes, **SMALL, **settings)).save_pretrained(path)
    return path


def test_a_stock_encoder_is_finetuned_and_judged(tmp_path):
    model = encoder_folder(tmp_path / "bert", BertModel, BertConfig)
    data = write_task(tmp_path, "classification", train=80)
    settings = [f"model.checkpoint={model}", f"training.output_dir={tmp_path / 'out'}", "training.save_model=true"]
    result = finetune(toy_config("classification", data, *settings, "optimizer.lr=0.003"))
    saved = tmp_path / "out" / "seed-0"
    again, text = evaluate(toy_config("classification", data, f"model.checkpoint={saved}"), baselines=True)
    assert again["scores"] == pytest.approx(result.summary["runs"][0]["scores"])
    assert text.splitlines()[2].startswith("| score (%) | seed-0 | majority | tf-idf")
    with pytest.raises(ConfigError, match=r"options\.max_length is 200, but the model has positions for 80 tokens"):
        evaluate(toy_config("classification", data, f"model.checkpoint={saved}", "options.max_length=200"))


@pytest.mark.parametrize("task", ["similarity", "token-classification"])
def test_other_stock_encoders(task, tmp_path):
    if task == "similarity":
        model = encoder_folder(tmp_path / "stock", BertModel, BertConfig)
    else:
        model = encoder_folder(tmp_path / "stock", CamembertForTokenClassification, CamembertConfig, num_labels=7)
    data = write_task(tmp_path, task)
    settings = [f"model.checkpoint={model}", f"training.output_dir={tmp_path / 'out'}"]
    assert finetune(toy_config(task, data, *settings)).summary["scores"]


def test_a_stock_t5_writes_summaries(tmp_path):
    tokenizer = small_tokenizer()
    save_tokenizer(tokenizer, tmp_path / "t5")
    config = T5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    data = write_task(tmp_path, "summarization", other=3)
    result, _ = evaluate(toy_config("summarization", data, f"model.checkpoint={tmp_path / 't5'}"), baselines=True)
    assert result["baselines"]["first sentence"]["rouge_l"] == pytest.approx(100.0)
    assert result["scores"].keys() == {"rouge1", "rouge2", "rouge_l"}


def test_classes_of_another_data_set_are_refused(tmp_path):
    model = encoder_folder(
        tmp_path / "bert", BertForSequenceClassification, BertConfig,
        id2label={0: "positif", 1: "négatif"}, label2id={"positif": 0, "négatif": 1},
    )  # fmt: skip
    data = write_task(tmp_path, "classification")
    with pytest.raises(CheckpointError, match=r"classes are positif, négatif, those of the data animaux, outils"):
        evaluate(toy_config("classification", data, f"model.checkpoint={model}"))


def test_a_tokenizer_larger_than_the_model_is_refused(checkpoint, tmp_path):
    model = encoder_folder(tmp_path / "bert", BertModel, BertConfig)
    backend = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    backend.add_tokens(["<nouveau>"])
    backend.save_pretrained(tmp_path / "larger")
    data = write_task(tmp_path, "classification")
    settings = [f"model.checkpoint={model}", f"model.tokenizer={tmp_path / 'larger'}"]
    with pytest.raises(CheckpointError, match=r"the tokenizer has .* tokens and .*bert an embedding of"):
        finetune(toy_config("classification", data, *settings, f"training.output_dir={tmp_path / 'out'}"))


def test_no_model_and_no_folder(checkpoint, tmp_path):
    data = write_task(tmp_path, "classification")
    with pytest.raises(ConfigError, match="no model is named"):
        finetune(toy_config("classification", data, f"training.output_dir={tmp_path / 'out'}"))
    with pytest.raises(ConfigError, match=r"training\.output_dir is missing"):
        finetune(toy_config("classification", data, f"model.checkpoint={checkpoint}"))
    with pytest.raises(FileNotFoundError):
        evaluate(toy_config("classification", data, f"model.checkpoint={tmp_path}/nothing"))


@pytest.mark.parametrize("task", ["classification", "token-classification", "question-answering"])
def test_a_new_head_hears_an_encoder_with_a_small_final_norm(task, checkpoint, tmp_path):
    """Pretrained final norms have small weights, and so have the states; the logits must start near 1 all the same."""
    weights = load_file(checkpoint / "model.safetensors")
    weights["encoder.final_layer_norm.weight"] *= 0.05
    shutil.copytree(checkpoint, tmp_path / "small")
    save_file(weights, tmp_path / "small" / "model.safetensors", metadata={"format": "pt"})
    own = task_class(task)(task_class(task).Options())
    own.labels = ["a", "b", "c"] if task != "question-answering" else None
    model, missing = load_task_model(own, ModelSettings(str(tmp_path / "small")), small_tokenizer())
    assert missing
    # One token a text, so that pooling averages nothing away.
    output = model.eval()(input_ids=torch.arange(300, 700)[:, None])
    logits = torch.cat([output[0], output[1]], -1) if task == "question-answering" else output.logits
    assert 0.3 < float(logits.detach().pow(2).mean().sqrt()) < 2.0


def test_lora_trains_few_weights_and_saves_a_plain_model(checkpoint, tmp_path):
    pytest.importorskip("peft")
    data = write_task(tmp_path, "classification", train=80)
    settings = [f"model.checkpoint={checkpoint}", f"training.output_dir={tmp_path / 'out'}", "training.save_model=true"]
    result = finetune(toy_config("classification", data, *settings, "lora.rank=2", "optimizer.lr=0.01"))
    saved = load_file(tmp_path / "out" / "seed-0" / "model.safetensors")
    assert not [name for name in saved if "lora" in name or "base_layer" in name]
    before = load_file(checkpoint / "model.safetensors")
    assert torch.equal(saved["transformer.shared.weight"], before["shared.weight"])
    query = "encoder.block.0.layer.0.SelfAttention.q.weight"
    change = saved[f"transformer.{query}"] - before[query]
    assert change.abs().max() > 1e-4
    assert torch.linalg.matrix_rank(change, rtol=1e-3) <= 2
    model = f"model.checkpoint={tmp_path / 'out' / 'seed-0'}"
    assert evaluate(toy_config("classification", data, model))[0]["scores"] == pytest.approx(
        result.summary["runs"][0]["scores"]
    )


def test_lora_that_cannot_be(checkpoint, tmp_path, monkeypatch):
    data = write_task(tmp_path, "classification")
    settings = [f"model.checkpoint={checkpoint}", f"training.output_dir={tmp_path / 'out'}", "lora.rank=2"]
    with pytest.raises(ConfigError, match="lora adapts pretrained weights"):
        finetune(toy_config("classification", data, *settings, "model.from_scratch=true"))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"LoRA needs the package peft.*pip install 'fat5\[lora\]'"):
        finetune(toy_config("classification", data, *settings))


def test_energy_is_measured_and_skipped_without_the_package(monkeypatch, caplog):
    class Meter:
        def __init__(self, country, gpus):
            assert (country, gpus) == ("FRA", None)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.over = True

        def read(self):
            assert self.over, "read before the end"
            return Energy(kwh=0.25, co2_kg=0.014)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(energy, "EnergyMeter", Meter)
    monkeypatch.setattr(energy, "find_spec", lambda name: name)
    with energy.measured_energy("FRA") as figures:
        assert figures == {}
    assert figures == {"energy_kwh": 0.25, "co2_kg": 0.014}
    with energy.measured_energy(None) as figures:
        pass
    assert figures == {}
    monkeypatch.setattr(energy, "find_spec", lambda name: None)
    with caplog.at_level("INFO"), energy.measured_energy("FRA") as figures:
        pass
    assert figures == {}
    assert "codecarbon is not installed" in caplog.text
