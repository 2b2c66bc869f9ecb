"""One model's curve: the same weights, batches, optimiser and schedule, against its own clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.curves.corpus import Corpus
from benchmarks.pretraining.steps import Implementation, Step
from benchmarks.pretraining.workload import Workload
from fat5.data.loader import data_loader
from fat5.optim import OptimizerConfig, ScheduleConfig, build_optimizer, build_schedule
from fat5.training.trainer import METADATA


@dataclass(frozen=True)
class Plan:
    """What every model does.

    Attributes:
        seconds: Training time of each, without compiling, evaluation and loading.
        evaluate_every: Steps between evaluations.
        eval_batches: Validation batches.
        lr: Learning rate after the warm-up; constant, so that a curve does not hang on where it ends.
        warmup: Steps of the warm-up.
        workers: Worker processes.
        max_steps: Most steps.
    """

    seconds: float
    evaluate_every: int
    eval_batches: int
    lr: float
    warmup: int
    workers: int
    max_steps: int


def draw_curve(
    implementation: Implementation,
    workload: Workload,
    corpus: Corpus,
    plan: Plan,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[dict[str, Any]]:
    """Yield a row at each evaluation: step, epoch, tokens, seconds, training loss, validation loss and accuracy."""
    step = Step(implementation, workload, device, dtype)
    optimizer = build_optimizer(step.model, OptimizerConfig(lr=plan.lr))
    schedule = build_schedule(optimizer, ScheduleConfig(name="constant", warmup_steps=plan.warmup), plan.max_steps)
    loader = data_loader(corpus.train, num_workers=plan.workers, pin_memory=device.type == "cuda")
    held_out = [to_device(batch, device)[0] for batch in islice(corpus.validation, plan.eval_batches)]
    synchronize = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    total = torch.zeros((), device=device)
    tokens, seconds = 0, 0.0
    started = time.perf_counter()
    yield {"step": 0, "epoch": 0.0, "tokens": 0, "seconds": 0.0, **evaluate(step.model, held_out)}
    for done, batch in enumerate(islice(loader, plan.max_steps), start=1):
        inputs, count = to_device(batch, device)
        loss = step.backward(inputs)
        torch.nn.utils.clip_grad_norm_(step.model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total += loss
        tokens += count
        if done <= implementation.warm_up_steps:
            synchronize()
            started = time.perf_counter()
        if done % plan.evaluate_every == 0:
            synchronize()
            seconds += time.perf_counter() - started
            text = corpus.train.statistics(done)
            yield {
                "step": done,
                "epoch": (text.text_tokens + text.skipped_tokens) / corpus.tokens,
                "tokens": tokens,
                "seconds": seconds,
                "loss": float(total) / plan.evaluate_every,
                **evaluate(step.model, held_out),
            }
            total.zero_()
            if seconds >= plan.seconds:
                return
            started = time.perf_counter()


def to_device(batch: dict[str, Any], device: torch.device) -> tuple[dict[str, Tensor], int]:
    """Return what a model takes of a batch of rows, and its real tokens."""
    inputs = {name: value.to(device, non_blocking=True) for name, value in batch.items() if name not in METADATA}
    return inputs, int(batch["num_input_tokens"]) + int(batch["num_target_tokens"])


@torch.no_grad()
def evaluate(model: nn.Module, batches: list[dict[str, Tensor]]) -> dict[str, float]:
    """Return cross-entropy and masked accuracy a target token, from the logits, whichever model it is."""
    sums = torch.zeros(3, dtype=torch.float64, device=batches[0]["labels"].device)
    model.eval()
    for batch in batches:
        labels = batch["labels"]
        inputs = {name: value for name, value in batch.items() if name not in ("labels", "decoder_input_ids")}
        # Past the compiled graph: evaluation is not timed, and would compile a second one.
        logits = model.forward(**inputs, decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels)).logits
        for row, target in zip(logits, labels, strict=True):  # float32 a row at a time
            kept = target != -100
            losses = torch.nn.functional.cross_entropy(row[kept].float(), target[kept], reduction="sum")
            correct = (row[kept].argmax(-1) == target[kept]).sum()
            sums += torch.stack([losses.double(), correct.double(), kept.sum().double()])
    model.train()
    loss, correct, count = sums.tolist()
    return {"eval_loss": loss / count, "eval_accuracy": correct / count}
