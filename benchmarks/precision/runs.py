"""One pretraining run a number format: the quickstart's model, text and settings, the same data and weights."""

from __future__ import annotations

import contextlib
import io
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.subject import GateError, Prepared, Subject
from fat5.data.pretokenize import TRAIN, VALIDATION, PretokenizeConfig, pretokenize
from fat5.data.sample import sample_documents
from fat5.data.tokenizer import load_tokenizer, save_tokenizer
from fat5.data.tokenizer_training import TokenizerConfig, train_tokenizer
from fat5.training.config import PretrainConfig
from fat5.training.config_file import load_settings
from fat5.training.pretrain import pretrain
from fat5.training.quickstart import VALIDATION_FRACTION, VOCAB_SIZE, quickstart_config_path

RUNS = {
    "fp32": ("training.precision=fp32",),
    "bf16-kahan": ("training.precision=bf16", "optimizer.kahan=true"),
    "bf16": ("training.precision=bf16", "optimizer.kahan=false"),
}
"""By name the settings that differ; the first is what the others are compared with."""

BASE = next(iter(RUNS))
_EVAL_BATCHES = 64
POINTS = 100
"""Means of the loss that a curve is recorded as."""


@dataclass
class Curve:
    """What a run left.

    Attributes:
        losses: Of each step.
        eval_loss: Cross-entropy of the trained model on the held-out text.
    """

    losses: list[float]
    eval_loss: float

    @property
    def tail(self) -> int:
        """Steps at the end that the run is judged by: a tenth."""
        return max(1, len(self.losses) // 10)

    @property
    def last(self) -> float:
        """Mean loss of these steps."""
        return statistics.fmean(self.losses[-self.tail :])

    def points(self) -> list[tuple[int, float]]:
        """Return step and mean loss of equal parts of the run."""
        size = max(1, len(self.losses) // POINTS)
        starts = range(0, len(self.losses) - size + 1, size)
        return [(start + size, statistics.fmean(self.losses[start : start + size])) for start in starts]


def prepare_text(folder: Path) -> None:
    """Train the quickstart's tokenizer and tokenise its text into a folder."""
    documents = list(sample_documents())
    tokenizer = train_tokenizer(documents, TokenizerConfig(vocab_size=VOCAB_SIZE), show_progress=False)
    save_tokenizer(tokenizer, folder / "tokenizer")
    pretokenize(
        documents,
        load_tokenizer(folder / "tokenizer"),
        folder / "tokens",
        PretokenizeConfig(validation_fraction=VALIDATION_FRACTION),
        show_progress=False,
    )


def settings(name: str, steps: int, folder: Path) -> PretrainConfig:
    """Return the quickstart's settings for so many steps in the number format `name`."""
    changes = {
        "data.train": folder / "tokens" / TRAIN,
        "data.validation": folder / "tokens" / VALIDATION,
        "training.output_dir": folder / name,
        "training.device": "auto" if torch.cuda.is_available() else "cpu",
        "training.max_steps": steps,
        "training.eval_at_start": "false",
        "training.eval_every": steps,
        "training.eval_batches": _EVAL_BATCHES,
        "training.save_every": steps,
        "training.log_every": 1,
        "training.report_to": "[]",
    }
    overrides = [f"{key}={value}" for key, value in changes.items()]
    return load_settings(PretrainConfig, quickstart_config_path(), [*overrides, *RUNS[name]])


def train(name: str, steps: int, folder: Path) -> Curve:
    """Pretrain, and return the losses; the bar shows, but not a line a step."""
    with contextlib.redirect_stdout(io.StringIO()):
        result = pretrain(settings(name, steps, folder))
    if result.stopped_by is not None:
        raise KeyboardInterrupt
    losses = [entry["loss"] for entry in result.log_history if "loss" in entry]
    return Curve(losses, result.evaluation["eval_loss"])


def subject(name: str, steps: int, folder: Path, curves: dict[str, Curve]) -> Subject:
    """Return a run as the session measures it; its curve goes to `curves`."""

    def prepare() -> Prepared:
        curve = curves[name] = train(name, steps, folder)
        return Prepared(check=lambda: _check(curve, steps), figures=lambda: _figures(curve, curves.get(BASE)))

    return Subject(name, {"table": "run", "steps": steps}, prepare)


def _check(curve: Curve, steps: int) -> float:
    """Return the last loss as a share of the first.

    Raises:
        GateError: Steps are missing, or nothing was learned.
    """
    if len(curve.losses) != steps:
        raise GateError(f"{len(curve.losses)} losses were logged, expected {steps}")
    share = curve.last / curve.losses[0]
    if not share < 1:
        raise GateError(f"the loss went from {curve.losses[0]:.3f} to {curve.last:.3f}")
    return share


def _figures(curve: Curve, base: Curve | None) -> dict[str, Any]:
    distance = None if base is None else curve.last / base.last - 1
    return {"last_loss": curve.last, "tail": curve.tail, "eval_loss": curve.eval_loss, "distance": distance}
