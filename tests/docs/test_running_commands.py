"""The commands of each page run one after the other in one folder, as a reader types them, at toy size."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from fat5.cli.main import main
from fat5.training.config import PretrainConfig
from fat5.training.config_file import load_settings

from .markdown import Block, blocks, commands
from .stand_ins import FINETUNING, PRETRAINING, place, save_trained

MODELS = ("runs/french-small", "runs/mine")
# The tutorial's commands are those of a script, and coming-from's need what its Python blocks make.
ELSEWHERE = ("docs/tutorial.md", "docs/coming-from.md")  # test_tutorial.py, ../test_coming_from.py
CHEAP = ("README.md", "docs/pretraining.md", "docs/generation.md", "docs/recipes/serve.md")


def runnable() -> dict[str, list[Block]]:
    """Return the blocks of each page that need nothing."""
    found: dict[str, list[Block]] = {}
    for block in blocks("bash"):
        if not block.needs and block.page not in ELSEWHERE:
            found.setdefault(block.page, []).append(block)
    return found


def toy(words: list[str]) -> list[str]:
    """Return the command with settings that make it short."""
    name = words[0]
    # What a shell would do to `corpus/*.jsonl`.
    words = [one for word in words for one in (sorted(map(str, Path().glob(word))) if "*" in word else [word])]
    if name == "train-tokenizer":
        return [*words, "--vocab-size", "1024"]
    if name == "pretokenize":
        return [*words, "--validation-fraction", "0.2"]
    if name == "pretrain":
        return [*words, *PRETRAINING]
    if name in ("finetune", "evaluate", "sweep"):
        reads_windows = "question-answering" in words
        return [*words, *FINETUNING, *(["options.stride=8"] if reads_windows else [])]
    if name == "generate":
        return [*words, "--max-new-tokens", "4"]
    return words


def run(parts: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    *feeding, command = parts
    if feeding:
        [[program, file]] = feeding
        assert program == "cat"
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path(file).read_bytes())))
    if command[0] == "fat5":
        assert main(toy(command[1:])) == 0, command
    elif command[0] == "python":
        done = subprocess.run([sys.executable, *command[1:]], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    else:
        assert command == ["source", "fat5-completion.bash"], f"no test runs {command}"


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[] if page in CHEAP else [pytest.mark.slow]) for page in runnable()]
)
def test_the_commands_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = [parts for block in runnable()[page] for parts in commands(block.text)]
    place(tmp_path)
    made = {trained_by(parts[-1]) for parts in found if parts[-1][:2] == ["fat5", "pretrain"]}
    for name in MODELS:
        if name not in made:
            save_trained(tmp_path / name)
    for parts in found:
        run(parts, monkeypatch)
        for folder in results_of(parts[-1]):
            assert Path(folder).exists(), parts


def trained_by(words: list[str]) -> str:
    """Return the folder of a pretraining."""
    config, *overrides = words[2:]
    return load_settings(PretrainConfig, config, overrides).training.output_dir


def results_of(words: list[str]) -> list[str]:
    """Return what a command must have made."""
    made = [words[place + 1] for place, word in enumerate(words) if word == "--output"]
    if words[:2] == ["fat5", "pretrain"]:
        made.append(f"{trained_by(words)}/model.safetensors")
    if words[:2] == ["fat5", "export"]:
        made.append(f"{words[3]}/config.json")
    return made


def test_every_page_with_commands_is_run():
    assert {"README.md", "docs/pretraining.md", "docs/recipes/own-language.md", "docs/tasks/README.md"} <= set(
        runnable()
    )
