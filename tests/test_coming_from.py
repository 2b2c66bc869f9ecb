"""Every block of docs/coming-from.md runs, on a tiny model in the place of those of the hub."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from fat5.cli.main import main
from fat5.training.config import PretrainConfig
from fat5.training.config_file import load_settings
from tests.data.small_tokenizer import small_tokenizer
from tests.models.t5_families import save_t5, t5_model

PAGE = Path(__file__).parents[1] / "docs" / "coming-from.md"
HUB = ("google/flan-t5-small", "google/t5-v1_1-base")
OPTIONAL = ("peft", "sentence_transformers")


def blocks() -> list[tuple[str, str]]:
    """Language and content of each fenced block, in the order of the page."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the models that the page names."""
    monkeypatch.chdir(tmp_path)
    for name in HUB:
        save_t5("flan-t5", Path(name), vocab_size=1024)
        small_tokenizer().save_pretrained(name)
    Path("nanot5").mkdir()
    torch.save(t5_model("flan-t5", vocab_size=1024).state_dict(), "nanot5/pytorch_model.bin")
    return tmp_path


def test_every_block_runs(here, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    names: dict[str, object] = {}
    ran = []
    for language, code in blocks():
        skipped = [name for name in OPTIONAL if name in code and importlib.util.find_spec(name) is None]
        if skipped:
            continue
        ran.append(language)
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(code, f"{PAGE.name}: {code.strip().splitlines()[0]}", "exec"), names)
        elif language == "yaml":
            Path("nano.yaml").write_text(code)
            config = load_settings(PretrainConfig, "nano.yaml", [])
            assert config.training.max_steps == yaml.safe_load(code)["training"]["max_steps"]
        else:
            for line in code.splitlines():
                command, *arguments = shlex.split(line)
                assert command == "fat5"
                assert main(arguments) == 0
    assert ran.count("python") >= 10
    assert {"yaml", "bash"} <= set(ran)
    assert Path("t5-model/config.json").is_file()
    assert names["loss"].isfinite()


def test_the_page_names_every_model_that_the_test_replaces():
    code = "\n".join(code for _, code in blocks())
    found = set(re.findall(r"from_pretrained\(\"([\w.-]+/[\w.-]+)\"", code))
    assert found == set(HUB)
