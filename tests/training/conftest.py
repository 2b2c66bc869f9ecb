"""A toy corpus, its tokenizer, and a model small enough to train in a test."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fat5.data.pretokenize import PretokenizeConfig, pretokenize
from fat5.data.sample import sample_documents
from fat5.data.tokenizer import save_tokenizer
from fat5.data.tokenizer_training import TokenizerConfig, train_tokenizer
from fat5.training.config import PretrainConfig
from fat5.training.config_file import build_settings


class Toy(NamedTuple):
    """Folders of the toy corpus."""

    train: Path
    validation: Path
    tokenizer: Path
    text: Path


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keep each test to one thread: the models are too small to gain from two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    root = tmp_path_factory.mktemp("toy")
    documents = list(islice(sample_documents(), 160))
    tokenizer = train_tokenizer(documents, TokenizerConfig(vocab_size=640), show_progress=False)
    save_tokenizer(tokenizer, root / "tokenizer")
    pretokenize(documents, tokenizer, root / "tokens", PretokenizeConfig(validation_fraction=0.1), show_progress=False)
    (root / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return Toy(root / "tokens" / "train", root / "tokens" / "validation", root / "tokenizer", root / "text.jsonl")


def toy_settings(toy: Toy, output_dir: Path, **changes: Any) -> dict[str, Any]:
    """Return the nested settings of a toy run; `changes` are `section__key=value`."""
    values: dict[str, dict[str, Any]] = {
        "data": {"train": str(toy.train), "validation": str(toy.validation)},
        "training": {
            "output_dir": str(output_dir),
            "max_steps": 6,
            "eval_every": 100,
            "eval_batches": 2,
            "save_every": 3,
            "save_total_limit": 3,
            "log_every": 1,
            "num_workers": 0,
            "report_to": [],
        },
        "model": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "z_loss": 1e-3},
        "denoising": {"max_input_length": 96, "max_target_length": 96, "encoder_budget": 384},
    }
    for name, value in changes.items():
        section, key = name.split("__")
        values.setdefault(section, {})[key] = value
    return values


@pytest.fixture
def settings(toy: Toy, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return `toy_settings` of a run in `tmp_path / "run"`."""
    return functools.partial(toy_settings, toy, tmp_path / "run")


@pytest.fixture
def make_config(settings: Callable[..., dict[str, Any]]) -> Callable[..., PretrainConfig]:
    """Return a function from `section__key=value` to the settings of a toy run."""
    return lambda **changes: build_settings(PretrainConfig, settings(**changes))
