"""The trainer's arithmetic: accumulation, evaluation by denoiser, and what the logs say."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LambdaLR

from fat5.data.denoising_dataset import DenoisingDataset
from fat5.errors import FAT5Error
from fat5.models import FAT5ForConditionalGeneration
from fat5.optim import build_optimizer, build_schedule
from fat5.training.arguments import training_arguments
from fat5.training.config import PretrainConfig
from fat5.training.pretrain import pretrain
from fat5.training.run_data import RunData, open_run_data
from fat5.training.trainer import METADATA, PretrainTrainer

PADDED = {
    "denoising__layout": "padded",
    "denoising__encoder_budget": None,
    "denoising__batch_size": 3,
    "denoising__max_input_length": 48,
    "denoising__max_target_length": 48,
}


class Merged(DenoisingDataset):
    """The padded batches of a stream, each `merge` of them as one."""

    merge = 4

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batches = super().__iter__()
        while group := list(islice(batches, self.merge)):
            yield {
                name: torch.cat([batch[name] for batch in group]) if torch.is_tensor(value) else sum_of(group, name)
                for name, value in group[0].items()
            }


def sum_of(group: list[dict[str, Any]], name: str) -> int:
    return sum(batch[name] for batch in group)


def make_model(config: PretrainConfig, data: RunData) -> FAT5ForConditionalGeneration:
    torch.manual_seed(1)
    return FAT5ForConditionalGeneration(config.model.build(len(data.tokenizer), pad=0, eos=data.special_tokens.eos))


def make_trainer(
    config: PretrainConfig,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    dataset: type[DenoisingDataset] = DenoisingDataset,
    kind: type[PretrainTrainer] = PretrainTrainer,
) -> PretrainTrainer:
    data = open_run_data(config.data, config.denoising)
    model = make_model(config, data)
    arguments = training_arguments(config.training, evaluate=data.validation is not None, precision="fp32")
    arguments.max_steps = config.training.max_steps or 1
    if optimizer is None:
        own = build_optimizer(model, config.optimizer)
        optimizers: Any = (own, build_schedule(own, config.schedule, arguments.max_steps))
    else:
        own = optimizer(model.parameters())
        optimizers = (own, LambdaLR(own, lambda step: 1.0))
    return kind(
        model=model,
        args=arguments,
        train_dataset=dataset(data.train, data.special_tokens, data.denoising),
        eval_dataset=data.evaluation_set(),
        optimizers=optimizers,
        num_tokens=data.num_tokens,
        structural_ids={*data.special_tokens.sentinels, data.special_tokens.eos},
        max_eval_batches=config.training.eval_batches,
    )


def logged(trainer: PretrainTrainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_four_small_batches_a_step_equal_one_large_batch(make_config, tmp_path):
    """The micro-batches hold different numbers of target tokens: a mean of means would differ."""

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.5)

    small = make_config(
        **PADDED, training__gradient_accumulation_steps=4, training__max_steps=3, training__save_every=100
    )
    large = dataclasses.replace(
        small,
        training=dataclasses.replace(small.training, gradient_accumulation_steps=1, output_dir=str(tmp_path / "large")),
    )
    first, second = make_trainer(small, sgd), make_trainer(large, sgd, Merged)
    first.train()
    second.train()
    for name in ("loss", "z_loss", "accuracy", "grad_norm"):
        assert logged(first, name) == pytest.approx(logged(second, name), rel=1e-5), name
    assert logged(first, "tokens_seen") == logged(second, "tokens_seen")
    for (name, ours), theirs in zip(first.model.named_parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=name)
    counts = [batch["num_target_tokens"] for batch in islice(first.train_dataset, 4)]
    assert len(set(counts)) > 1, "the test needs unequal batches"


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_evaluation_sums_are_those_of_the_logits_by_denoiser(make_config, layout):
    """Pitfall: means over all tokens instead of kept ones; z-loss or smoothing inside the evaluation loss."""
    config = make_config(
        **(PADDED if layout == "padded" else {}),
        model__z_loss=0.1,
        model__label_smoothing=0.2,
        training__eval_batches=3,
    )
    trainer = make_trainer(config)
    metrics = trainer.evaluate()
    assert (trainer.model.config.z_loss, trainer.model.config.label_smoothing) == (0.1, 0.2)

    structural = trainer.structural_ids
    names = [denoiser.name for denoiser in trainer.eval_dataset.denoisers]
    rows: dict[str, list[tuple[float, bool, bool]]] = {name: [] for name in names}
    for batch in islice(trainer.eval_dataset, 3):
        inputs = {name: value for name, value in batch.items() if name not in METADATA}
        with torch.no_grad():
            logits = trainer.model(**inputs, return_logits=True).logits
        for where, denoiser in documents_of(batch):
            labels = batch["labels"][where]
            kept = labels != -100
            losses = F.cross_entropy(logits[where][kept], labels[kept], reduction="none")
            correct = logits[where][kept].argmax(-1) == labels[kept]
            text = [label not in structural for label in labels[kept].tolist()]
            rows[names[denoiser]] += zip(losses.tolist(), correct.tolist(), text, strict=True)
    everything = [row for group in rows.values() for row in group]
    assert sum(bool(group) for group in rows.values()) > 3, "the test needs several denoisers"
    for suffix, group in [("", everything), *((f"/{name}", group) for name, group in rows.items() if group)]:
        expected = {
            "loss": sum(row[0] for row in group) / len(group),
            "accuracy": sum(row[1] for row in group) / len(group),
            "accuracy_text": sum(row[1] for row in group if row[2]) / sum(row[2] for row in group),
            "target_tokens": len(group),
        }
        expected["perplexity"] = math.exp(expected["loss"])
        for name, value in expected.items():
            assert metrics[f"eval_{name}{suffix}"] == pytest.approx(value, rel=1e-4), name + suffix
    assert metrics["eval_loss"] > 5, "an untrained model starts near ln V"


def documents_of(batch: dict[str, Any]) -> Iterator[tuple[Any, int]]:
    """Yield where each document's targets lie and its denoiser."""
    for index, denoiser in enumerate(batch["denoiser_ids"].tolist()):
        if denoiser < 0:
            continue
        if "decoder_cu_seqlens" in batch:
            start, stop = batch["decoder_cu_seqlens"][index : index + 2].tolist()
            yield slice(start, stop), denoiser
        else:
            yield index, denoiser


def test_evaluation_makes_no_logits(make_config):
    """Pitfall: evaluation keeps every logit."""
    trainer = make_trainer(make_config())

    def refuse(*_: Any) -> None:
        raise AssertionError("the LM head was run as a module: logits exist")

    trainer.model.lm_head.register_forward_pre_hook(refuse)
    outputs = []
    trainer.model.register_forward_hook(lambda *arguments: outputs.append(arguments[-1]))
    assert trainer.evaluate()["eval_target_tokens"] > 0
    assert outputs
    assert all(output.logits is None for output in outputs)


def test_logs_count_real_tokens_and_show_the_true_learning_rate(make_config):
    config = make_config(
        training__max_steps=4,
        training__log_every=2,
        training__save_every=100,
        schedule__warmup_steps=2,
        optimizer__lr=0.01,
    )
    trainer = make_trainer(config)
    trainer.train()
    batches = list(islice(trainer.train_dataset, 4))
    tokens = [batch["num_input_tokens"] + batch["num_target_tokens"] for batch in batches]
    assert tokens[0] < batches[0]["input_ids"].numel() + batches[0]["labels"].numel(), "the test needs padding"
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in entries] == [1, 2, 4]
    assert [entry["tokens_seen"] for entry in entries] == [tokens[0], sum(tokens[:2]), sum(tokens)]
    # Cosine over 4 steps after a warm-up of 2, each as it was at the step: 0, 0.5, 1, 0.5 of the peak.
    assert [entry["learning_rate"] for entry in entries] == pytest.approx([0.0, 0.005, 0.005])
    for entry in entries:
        assert entry["warm_up_seconds" if entry["step"] == 1 else "tokens_per_second"] > 0
        assert 0 < entry["z_loss"] < entry["loss"]
        assert 0 < entry["fill"] <= 1
    text = trainer.train_dataset.statistics(4)
    assert entries[-1]["epoch"] == pytest.approx((text.text_tokens + text.skipped_tokens) / trainer.num_tokens)


def test_a_log_window_is_the_mean_of_its_steps(make_config):
    settings = {"training__max_steps": 5, "training__save_every": 100, "optimizer__lr": 0.1}
    each, window = (make_trainer(make_config(**settings, training__log_every=every)) for every in (1, 4))
    each.train()
    window.train()
    for name in ("loss", "z_loss"):
        first, *rest = logged(each, name)
        assert max(rest) > min(rest) * 1.001, "the test needs steps that differ"
        assert logged(window, name)[:2] == pytest.approx([first, sum(rest[:3]) / 3], rel=1e-5), name


@pytest.mark.parametrize(
    ("precision", "weights"),
    [("bf16", torch.bfloat16), ("bf16-mixed", torch.float32), ("fp32", torch.float32), ("auto", torch.float32)],
)
def test_each_precision_trains_and_evaluates(make_config, tmp_path, precision, weights):
    run = pretrain(
        make_config(
            training__precision=precision,
            training__max_steps=30,
            training__device="cpu",
            optimizer__lr=0.05,
            training__save_every=30,
            training__eval_at_start=True,
        )
    )
    stored = load_file(run.output_dir / "model.safetensors")
    assert {value.dtype for value in stored.values()} == {weights}
    losses = [entry["eval_loss"] for entry in run.log_history if "eval_loss" in entry]
    assert losses[-1] < losses[0] - 0.3


def test_logged_loss_is_the_models_at_the_first_step(make_config):
    """Pitfall: an untied LM head initialised with std 1 starts near 110; right is near ln V."""
    trainer = make_trainer(make_config(training__max_steps=1))
    batch = next(iter(trainer.train_dataset))
    with torch.no_grad():
        output = trainer.model(**{name: value for name, value in batch.items() if name not in METADATA})
    trainer.train()
    (entry,) = (entry for entry in trainer.state.log_history if "loss" in entry)
    assert entry["loss"] == pytest.approx(float(output.loss), rel=1e-5)
    assert entry["z_loss"] == pytest.approx(float(output.z_loss), rel=1e-5)
    assert entry["accuracy"] == pytest.approx(float(output.correct.sum() / output.count))
    assert entry["loss"] == pytest.approx(math.log(640), abs=1)


def test_divergence_stops_the_run_and_is_not_saved(make_config, tmp_path):
    trainer = make_trainer(
        make_config(training__save_every=2), lambda parameters: torch.optim.SGD(parameters, lr=float("nan"))
    )
    with pytest.raises(FAT5Error, match=r"loss is nan at step 2: training has diverged; start again with a lower"):
        trainer.train()
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_worker_processes_give_the_same_run(make_config, tmp_path):
    one = pretrain(make_config(training__max_steps=3, data__validation=None))
    other = pretrain(
        make_config(
            training__max_steps=3,
            training__num_workers=2,
            data__validation=None,
            training__output_dir=str(tmp_path / "workers"),
        )
    )
    losses = [[entry["loss"] for entry in run.log_history if "loss" in entry] for run in (one, other)]
    assert losses[0] == losses[1]


def test_gradient_checkpointing_gives_the_same_losses(make_config, tmp_path):
    """Pitfall: recomputation under gradient checkpointing draws new dropout."""
    runs = [
        pretrain(
            make_config(
                training__max_steps=2,
                data__validation=None,
                model__dropout_rate=0.2,
                training__gradient_checkpointing=on,
                training__output_dir=str(tmp_path / str(on)),
            )
        )
        for on in (False, True)
    ]
    losses, norms = ([[e[n] for e in run.log_history if n in e] for run in runs] for n in ("loss", "grad_norm"))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize("max_grad_norm", [0.05, 0.0])
def test_clipping_in_the_optimizer_is_the_trainers_own(make_config, tmp_path, monkeypatch, max_grad_norm):
    changes = {"training__max_steps": 3, "training__save_every": 100, "data__validation": None}
    trainers = []
    for name in ("in the step", "before it"):
        if name == "before it":
            monkeypatch.setattr(PretrainTrainer, "_clip_in_the_step", lambda self, max_norm: None)
        output_dir = str(tmp_path / name)
        config = make_config(**changes, training__output_dir=output_dir, training__max_grad_norm=max_grad_norm)
        trainers.append(make_trainer(config))
        trainers[-1].train()
    ours, theirs = trainers
    for name in ("grad_norm", "loss"):
        assert logged(ours, name) == pytest.approx(logged(theirs, name), rel=1e-4), name
    assert min(logged(ours, "grad_norm")) > 0.1
    for (name, mine), other in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=2e-5, msg=name)
