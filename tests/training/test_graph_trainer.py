"""What CUDA graphs overwrite is used or moved before: the logs, weights and checkpoints are those without graphs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fat5.errors import ConfigError, FAT5Error
from fat5.training import compilation
from fat5.training.compilation import choose_compilation
from fat5.training.gradient_buffers import GradientBuffers
from fat5.training.graph_trainer import GraphTrainer
from fat5.training.run_data import open_run_data
from tests.training.replays import replaying
from tests.training.test_trainer import PADDED, logged, make_model, make_trainer

SETTINGS = {"training__max_steps": 4, "training__save_every": 2, "training__eval_every": 2, "training__log_every": 2}


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_run_of_replays_is_the_plain_one(make_config, tmp_path, accumulation):
    changes = {**SETTINGS, "training__gradient_accumulation_steps": accumulation, "training__eval_at_start": True}
    plain = make_trainer(make_config(**changes))
    replayed = make_trainer(make_config(**changes, training__output_dir=str(tmp_path / "replayed")), kind=GraphTrainer)
    for trainer in (plain, replayed):
        trainer.args.eval_on_start = True
    plain.train()
    with replaying() as replays:
        replays.watch(replayed.model)
        replayed.train()
    evaluations, batches = 3, 2
    assert replays.count == 4 * accumulation + evaluations * batches
    for name in ("loss", "z_loss", "accuracy", "grad_norm", "eval_loss", "eval_accuracy"):
        assert len(logged(plain, name)) == 3, name
        assert logged(replayed, name) == logged(plain, name), name
    for step in (2, 4):
        ours, theirs = (
            load_file(trainer.output_dir / f"checkpoint-{step}" / "model.safetensors") for trainer in (replayed, plain)
        )
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_replays_that_are_not_kept_apart_would_be_found(make_config):
    """The test above can fail: a trainer that lets autograd add to overwritten gradients gets no number."""
    trainer = make_trainer(make_config(**SETTINGS, training__gradient_accumulation_steps=2), kind=GraphTrainer)
    trainer._gradients = None
    with replaying() as replays:
        replays.watch(trainer.model)
        with pytest.raises(FAT5Error, match="the training loss is nan"):
            trainer.train()


def test_a_step_that_was_broken_off_leaves_nothing(make_config, tmp_path):
    """An error between the micro-batches of a step, and another call of `train`."""
    changes = {"training__gradient_accumulation_steps": 2, "training__max_steps": 1, "training__save_every": 100}
    trainers = [
        make_trainer(make_config(**changes, training__output_dir=str(tmp_path / name)), kind=GraphTrainer)
        for name in ("plain", "broken")
    ]
    plain, broken = trainers
    backward, calls = broken._backward, []

    def fail_at_the_second(loss):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        backward(loss)

    broken._backward = fail_at_the_second
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    for trainer in trainers:
        trainer.train()
    assert logged(broken, "grad_norm") == logged(plain, "grad_norm") != []


@pytest.mark.parametrize(("accumulation", "steps"), [(1, 2), (2, 1)])
def test_the_first_two_micro_batches_are_warm_up(make_config, accumulation, steps):
    changes = {"training__max_steps": 3, "training__gradient_accumulation_steps": accumulation}
    trainer = make_trainer(make_config(**changes, training__save_every=100), kind=GraphTrainer)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert ["warm_up_seconds" in entry for entry in entries] == [step < steps for step in range(3)]
    assert ["tokens_per_second" in entry for entry in entries] == [step >= steps for step in range(3)]


def named(parameters):
    return [(f"weight{index}", parameter) for index, parameter in enumerate(parameters)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_add_up_as_autograd_does(dtype):
    torch.manual_seed(0)
    shapes = [(3, 5), (7,), (1, 1), (64, 9)]
    parameters = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    frozen, idle = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(4, dtype=dtype))
    wide = nn.Parameter(torch.randn(6, dtype=torch.float64))
    buffers = GradientBuffers(named([*parameters[:2], frozen, wide, idle, *parameters[2:]]))
    used = [*parameters, wide]
    for _ in range(2):  # the second step must not see the first
        gradients = [[torch.randn_like(parameter) for parameter in used] for _ in range(3)]
        expected = [torch.zeros_like(parameter) for parameter in used]
        for index, batch in enumerate(gradients):
            for parameter, gradient, total in zip(used, batch, expected, strict=True):
                parameter.grad = gradient.clone()
                total.copy_(gradient) if index == 0 else total.add_(gradient)
            buffers.take()
            assert all(parameter.grad is None for parameter in used)
        buffers.give()
        for parameter, total in zip(used, expected, strict=True):
            assert torch.equal(parameter.grad, total)
            assert parameter.grad.is_contiguous()
            # As if each had been allocated: kernels are compiled for aligned addresses.
            assert (parameter.grad.data_ptr() - used[0].grad.data_ptr()) % 256 == 0 or parameter is wide
        assert idle.grad is None
        assert frozen.grad is None
        for parameter in used:
            parameter.grad = None


def test_ranks_are_counted_without_rounding(monkeypatch):
    """bf16 cannot add 1 to 256; here are 300 ranks, one after the other, and one of them lacks a gradient or none."""
    ranks, place, sent = 300, [0], []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: place[0])

    def reduced(have) -> GradientBuffers:
        parameters = [nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2)]
        buffers = GradientBuffers(named(parameters))
        for parameter, has in zip(parameters, have, strict=True):
            parameter.grad = torch.ones_like(parameter) if has else None
        buffers.take()
        buffers.give(reduce=True)
        return buffers

    monkeypatch.setattr(torch.distributed, "all_reduce", lambda flat: sent.append(flat.clone()))
    for place[0] in range(ranks):
        with pytest.raises(FAT5Error, match=r"weight0 \(1\), weight1 \(1\)"):  # nobody else's has come
            reduced([True, True])
    for lacking, message in ((None, None), (299, r"rank 299: .* of the 300 ranks .*: weight1 \(299\); expected")):
        parts = list(sent)
        if lacking is not None:
            with pytest.raises(FAT5Error):
                reduced([True, False])
            parts[lacking] = sent.pop()
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        with monkeypatch.context() as context:
            context.setattr(torch.distributed, "all_reduce", lambda flat, total=total: flat.copy_(total))
            if message is None:
                reduced([True, True])
            else:
                with pytest.raises(FAT5Error, match=message):
                    reduced([True, False])


def test_graphs_are_taken_where_they_can_be(make_config, monkeypatch):
    """Shown on a CPU: the weight says that it is on a GPU, and that attention has kernels."""
    config = make_config()
    model = make_model(config, open_run_data(config.data, config.denoising))
    padded, longest = (make_config(**PADDED, denoising__pad_to=pad).denoising for pad in (None, "longest"))

    def mode(setting="auto", denoising=config.denoising, sharded=False):
        return choose_compilation(setting, model, denoising, sharded=sharded)

    assert mode().mode == "default"
    assert "no CUDA graphs, since the model is on the device cpu" in mode().reason
    with pytest.raises(ConfigError, match="reduce-overhead, which replays CUDA graphs, but the model is on the device"):
        mode("reduce-overhead")
    assert mode("max-autotune-no-cudagraphs").mode == "max-autotune-no-cudagraphs"

    weight = SimpleNamespace(is_cuda=True, new_empty=torch.empty)
    model = SimpleNamespace(config=model.config, shared=SimpleNamespace(weight=weight))
    assert mode().mode == "default"
    assert "attention runs in plain PyTorch" in mode().reason
    monkeypatch.setattr(compilation, "choose_backend", lambda name, heads: "kernels")
    assert mode() == ("reduce-overhead", "compile_mode=auto: the step replays CUDA graphs")
    assert mode().cuda_graphs
    assert mode(denoising=padded).cuda_graphs
    assert "pad_to=longest" in mode(denoising=longest).reason
    assert "sharded weights" in mode(sharded=True).reason
    assert not mode(sharded=True).cuda_graphs
    assert not mode("default").cuda_graphs
    with pytest.raises(ConfigError, match=r"max-autotune, .* but sharded weights"):
        mode("max-autotune", sharded=True)
