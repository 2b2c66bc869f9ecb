"""Every shipped configuration loads and builds, has the size it says, and carries the estimate of the function."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.initialization import no_init_weights

from benchmarks.collator.documents import RandomDocuments
from benchmarks.pretraining.workload import WORKLOADS
from fat5.data.budgets import resolve_budgets
from fat5.models import FAT5Config, FAT5ForConditionalGeneration
from fat5.training.config import PretrainConfig
from fat5.training.config_file import load_settings
from fat5.training.estimate import Estimate, estimate_step

FOLDER = Path(__file__).parents[2] / "configs"
PARAMETERS = {
    "french-small": 147,
    "french-small-128": 147,
    "french-base": 305,
    "french-large": 973,
    "french-original-mixture": 147,
    "french-fineweb2": 147,
    "minipile": 147,
    "one-hour": 147,
    "eight-minutes": 147,
    "flan-t5-continued": 248,
}
FLAN_T5_BASE = {"vocab_size": 32_128, "d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_heads": 12}


def load(name: str) -> PretrainConfig:
    return load_settings(PretrainConfig, FOLDER / f"{name}.yaml")


def model_of(config: PretrainConfig) -> FAT5Config:
    return FAT5Config(**FLAN_T5_BASE) if config.training.init_from else config.model.build(32_768, pad=0, eos=1)


@functools.cache
def lengths() -> np.ndarray:
    """Return those of documents that are log-normal, median 400."""
    return RandomDocuments(20_000).lengths


def estimate(config: PretrainConfig) -> Estimate:
    model, budgets = model_of(config), resolve_budgets(config.denoising, lengths(), 256)
    return estimate_step(model, budgets.encoder_budget, budgets.decoder_budget, config.denoising.max_input_length)


def line_of(figures: Estimate) -> str:
    return (
        f"# Estimated, not measured: {figures.parameters / 1e6:.0f} M parameters; {figures.memory_gib:.0f} GiB a GPU "
        f"in bf16; {figures.slots_per_second() / 1e3:.0f} thousand token slots/s at 40 % of an H200's peak."
    )


def test_every_configuration_is_known():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == {*PARAMETERS, "quickstart"}


@pytest.mark.parametrize("name", PARAMETERS)
def test_configuration_loads_and_states_its_size_memory_and_rate(name):
    figures = estimate(load(name))
    assert round(figures.parameters / 1e6) == PARAMETERS[name]
    assert line_of(figures) in (FOLDER / f"{name}.yaml").read_text().splitlines()


@pytest.mark.parametrize("name", ["french-small", "french-small-128", "french-base", "french-large"])
def test_models_have_the_parameters_of_the_estimate(name):
    config = load(name)
    with torch.device("meta"), no_init_weights():
        model = FAT5ForConditionalGeneration(model_of(config))
    # Without initialisation there is no tying: each stack still has an embedding of its own.
    counts = [value.numel() for name, value in model.named_parameters() if "embed_tokens" not in name]
    assert sum(counts) == estimate(config).parameters


def test_shapes_of_the_heads():
    shapes = {
        name: (load(name).model.num_heads, load(name).model.d_kv) for name in ("french-small", "french-small-128")
    }
    assert shapes == {"french-small": (8, 64), "french-small-128": (4, 128)}


def test_one_hour_of_tokens_is_an_hour_of_the_estimated_rate():
    config = load("one-hour")
    hours = config.training.max_tokens / estimate(config).slots_per_second() / 3600
    assert 0.8 < hours < 0.87, "an hour less start, evaluation and saving"


def test_operations_are_those_of_the_benchmark():
    workload = WORKLOADS["8x64"]
    model = load("french-small").model.build(32_768, pad=0, eos=1)
    encoder, decoder = workload.batch * workload.encoder, workload.batch * workload.decoder
    own = estimate_step(model, encoder, decoder, workload.encoder)
    # The benchmark's decoder rows are half as long as its encoder's; the estimate takes one length for all.
    own_pairs = 12 * (encoder + 1.5 * decoder) * 1024
    true_pairs = 12 * workload.batch * (1024**2 + 512**2 / 2 + 1024 * 512)
    difference = 3.5 * 4 * 512 * (own_pairs - true_pairs)
    assert own.flops - difference == pytest.approx(workload.flops, rel=1e-6)


def test_activations_are_what_autograd_keeps():
    """Counted on a small model on the torch backend, whose attention keeps its inputs and its result."""
    config = FAT5Config(vocab_size=64, d_model=64, d_kv=16, d_ff=160, num_layers=3, num_heads=4)
    model = FAT5ForConditionalGeneration(config).train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    offsets = torch.tensor([0, 128, 256], dtype=torch.int32)
    ids = torch.randint(3, 64, (256,))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(
            input_ids=ids, labels=ids, cu_seqlens=offsets, max_seqlen=128,
            decoder_cu_seqlens=offsets, decoder_max_seqlen=128,
        )  # fmt: skip
    figures = estimate_step(config, 256, 256, 128, precision="fp32")
    counted = sum(kept.values()) / 2**30
    # Eager code keeps some of what kernels and compiled graphs make again: activation functions and casts of norms.
    assert 0.55 < figures.activations_gib / counted < 1.05
    assert output.loss > 0
    less = estimate_step(config, 256, 256, 128, precision="fp32", gradient_checkpointing=True)
    assert less.activations_gib < figures.activations_gib / 2
    assert less.state_gib == figures.state_gib


def test_state_is_counted_by_precision_and_spread_by_shards():
    config = load("french-large").model.build(32_768, pad=0, eos=1)
    states = {
        precision: estimate_step(config, 1024, 1024, 1024, precision=precision).state_gib * 2**30 / 972.7e6
        for precision in ("bf16", "bf16-mixed", "fp32")
    }
    assert states == pytest.approx({"bf16": 12, "bf16-mixed": 16, "fp32": 16}, rel=1e-3)
    sharded = estimate_step(config, 1024, 1024, 1024, shard_degree=8)
    assert sharded.state_gib * 2**30 == pytest.approx(12 / 8 * sharded.parameters)
    assert dataclasses.replace(sharded, flops=sharded.flops * 2).slots_per_second() == pytest.approx(
        sharded.slots_per_second() / 2
    )
