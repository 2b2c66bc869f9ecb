"""The quickstart: from the shipped French text to a small pretrained T5, its loss beside honest baselines."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import cast

from fat5.data.denoising_dataset import DenoisingDataset
from fat5.data.pretokenize import TRAIN, VALIDATION, PretokenizeConfig, pretokenize
from fat5.data.sample import SAMPLE_NAME, sample_documents
from fat5.data.sources import TextSource
from fat5.data.tokenizer import load_tokenizer, save_tokenizer
from fat5.data.tokenizer_training import TokenizerConfig, train_tokenizer
from fat5.errors import ConfigError
from fat5.files import atomic_file
from fat5.models import FAT5ForConditionalGeneration
from fat5.training.baselines import target_counts, unigram_loss
from fat5.training.config import PretrainConfig
from fat5.training.config_file import load_settings
from fat5.training.fill import fill_masks
from fat5.training.plot import plot_loss
from fat5.training.pretrain import CURVE_NAME, PretrainResult, pretrain
from fat5.training.run_data import open_run_data

VOCAB_SIZE = 4096
VALIDATION_FRACTION = 0.05
SUMMARY_NAME = "summary.json"
_PARTS = ("tokenizer", "tokens", "run", SUMMARY_NAME)

MASKED_SENTENCES = (
    "Le ministre chargé <extra_id_0> fixe par arrêté la liste des pièces à fournir.",
    "La demande est adressée au directeur <extra_id_0> dans un délai de deux mois.",
    "Les modalités d'application du présent article sont fixées par décret en Conseil <extra_id_0>.",
)


@dataclass(frozen=True)
class QuickstartSummary:
    """What came out of it; the losses are nats a target token, all on the same targets.

    Attributes:
        output_dir: The folder that holds everything.
        parameters: Parameters of the model.
        steps: Optimiser steps.
        tokens_seen: Real tokens trained on, encoder and decoder.
        eval_loss: Loss of the trained model on the held-out text.
        unigram_loss: Loss of the add-one smoothed frequencies of the training targets.
        untrained_loss: Loss of the model before its first step.
        eval_accuracy: Share of the target tokens that the trained model predicts right.
        filled: Each masked sentence and what the model makes of it.
        seconds: Seconds of each part of the work.
    """

    output_dir: str
    parameters: int
    steps: int
    tokens_seen: int
    eval_loss: float
    unigram_loss: float
    untrained_loss: float
    eval_accuracy: float
    filled: dict[str, str]
    seconds: dict[str, float]


def quickstart_config_path() -> Path:
    """Return the path of the shipped settings, the `configs/quickstart.yaml` of the repository."""
    return Path(str(resources.files("fat5.training").joinpath("quickstart.yaml")))


def quickstart(
    output_dir: str | Path = "quickstart",
    *,
    overwrite: bool = False,
    overrides: Sequence[str] = (),
    report: Callable[[str], None] = print,
) -> QuickstartSummary | PretrainResult:
    """Train a tokenizer, tokenise, pretrain and look at the result, all on the text that comes with the package.

    Args:
        output_dir: Folder to make.
        overwrite: Replace an earlier quickstart there.
        overrides: Settings of the pretraining to change, `section.key=value`.
        report: Called with each line of text for people.

    Returns:
        The summary, also written as `summary.json`; the pretraining's result if a signal ended it early.

    Raises:
        ConfigError: An override is wrong, or takes away the evaluation that the summary is about.
        FileExistsError: The folder holds an earlier quickstart and `overwrite` is False, or something else.
    """
    root = Path(output_dir)
    settings = quickstart_config_path()
    places = {
        "data.train": root / "tokens" / TRAIN,
        "data.validation": root / "tokens" / VALIDATION,
        "training.output_dir": root / "run",
    }
    moved = [f"{key}={place}" for key, place in places.items()]
    config = load_settings(PretrainConfig, settings, [*moved, *overrides])
    if config.data.validation is None or not config.training.eval_at_start:
        raise ConfigError(
            "the quickstart compares losses: leave data.validation and training.eval_at_start as they are"
        )
    _claim(root, overwrite)
    commands = {
        "tokenizer": f"fat5 train-tokenizer {SAMPLE_NAME} --vocab-size {VOCAB_SIZE} --output {root}/tokenizer",
        "tokens": f"fat5 pretokenize {SAMPLE_NAME} --tokenizer {root}/tokenizer "
        f"--validation-fraction {VALIDATION_FRACTION} --output {root}/tokens",
        "training": " ".join(["fat5 pretrain", str(settings), *moved, *overrides]),
    }
    clock = _Clock(commands, report)

    with clock.part("tokenizer"):
        tokenizer = train_tokenizer(sample_documents(), TokenizerConfig(vocab_size=VOCAB_SIZE), show_progress=False)
        save_tokenizer(tokenizer, root / "tokenizer")
    with clock.part("tokens"):
        pretokenize(
            TextSource([SAMPLE_NAME]),
            load_tokenizer(root / "tokenizer"),
            root / "tokens",
            PretokenizeConfig(validation_fraction=VALIDATION_FRACTION),
            show_progress=False,
        )
    with clock.part("training"):
        result = pretrain(config)
    if result.stopped_by is not None:
        return result
    with clock.part("baselines and sentences"):
        summary = _examine(config, result)
    summary = replace(summary, seconds=clock.seconds)
    with atomic_file(root / SUMMARY_NAME) as path:
        path.write_text(json.dumps(asdict(summary), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return summary


def _claim(root: Path, overwrite: bool) -> None:
    existing = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    foreign = [name for name in existing if name not in _PARTS]
    if foreign:
        raise FileExistsError(f"{root} holds {foreign[0]!r}, which no quickstart made; name another --output-dir")
    if existing and not overwrite:
        raise FileExistsError(
            f"{root} holds an earlier quickstart; pass --overwrite to replace it, or name another --output-dir"
        )
    for name in existing:
        shutil.rmtree(root / name) if (root / name).is_dir() else (root / name).unlink()


def _examine(config: PretrainConfig, result: PretrainResult) -> QuickstartSummary:
    data = open_run_data(config.data, config.denoising)
    model = FAT5ForConditionalGeneration.from_pretrained(result.output_dir)
    evaluation = cast(DenoisingDataset, data.evaluation_set())
    vocab_size = model.config.vocab_size
    seen = result.step * config.training.gradient_accumulation_steps
    unigram = unigram_loss(
        target_counts(islice(data.training_set(), seen), vocab_size),
        target_counts(islice(evaluation, config.training.eval_batches), vocab_size),
    )
    untrained = next(entry["eval_loss"] for entry in result.log_history if "eval_loss" in entry)
    baselines = {"unigram": unigram, "untrained": untrained}
    plot_loss(result.log_history, result.output_dir / CURVE_NAME, title="Quickstart", baselines=baselines)
    return QuickstartSummary(
        output_dir=str(result.output_dir.parent),
        parameters=model.num_parameters(),
        steps=result.step,
        tokens_seen=int(result.evaluation["tokens_seen"]),
        eval_loss=result.evaluation["eval_loss"],
        unigram_loss=unigram,
        untrained_loss=untrained,
        eval_accuracy=result.evaluation["eval_accuracy"],
        filled={sentence: fill_masks(model, data.tokenizer, sentence) for sentence in MASKED_SENTENCES},
        seconds={},
    )


class _Clock:
    """Announces each part of the work with the command that does the same by hand, and takes its time."""

    def __init__(self, commands: dict[str, str], report: Callable[[str], None]) -> None:
        self.seconds: dict[str, float] = {}
        self._commands = commands
        self._report = report

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        if name in self._commands:
            self._report(f"\n$ {self._commands[name]}")
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 1)
        self._report(f"{name}: {self.seconds[name]:.1f} s")
