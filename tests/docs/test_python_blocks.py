"""Every Python block of README.md and docs runs, page by page, with tiny models under the names of the real ones."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools

import pytest
import torch
from torch import nn

from fat5.data.denoising_config import DenoisingConfig
from fat5.data.denoising_dataset import DenoisingDataset
from fat5.data.loader import data_loader
from fat5.data.pretokenize import PretokenizeConfig, pretokenize
from fat5.data.sample import sample_documents
from fat5.data.special_tokens import SpecialTokens
from fat5.data.token_dataset import TokenDataset
from fat5.models import FAT5ForSequenceClassification, FAT5ForTokenClassification
from fat5.models.export import export_checkpoint
from tests.data.small_tokenizer import small_tokenizer

from .markdown import Block, blocks
from .stand_ins import HUB, save_hub_model, save_toy

OPTIONAL = ("sentence_transformers", "ctranslate2", "peft")
ELSEWHERE = "docs/coming-from.md"  # tests/test_coming_from.py


def by_page() -> dict[str, list[Block]]:
    found: dict[str, list[Block]] = {}
    for block in blocks("python"):
        if not block.needs and block.page != ELSEWHERE:
            found.setdefault(block.page, []).append(block)
    return found


def names_of(page: str, folder) -> dict[str, object]:
    """Return what a page takes for granted."""
    if page == "docs/losses.md":
        torch.manual_seed(0)
        hidden = torch.randn(7, 16, requires_grad=True)
        return {"hidden": hidden, "lm_head": nn.Linear(16, 40, bias=False), "labels": torch.arange(7)}
    if page == "docs/data.md":
        tokenizer = small_tokenizer()
        documents = list(itertools.islice(sample_documents(), 60))
        pretokenize(documents, tokenizer, folder / "tokens", PretokenizeConfig(), show_progress=False)
        denoising = DenoisingConfig(max_input_length=64, max_target_length=64, encoder_budget=256)
        dataset = DenoisingDataset(
            TokenDataset(folder / "tokens"), SpecialTokens.from_tokenizer(tokenizer), denoising, epochs=1
        )
        return {"tokenizer": tokenizer, "denoising": denoising, "dataset": dataset, "data_loader": data_loader}
    return {}


@pytest.mark.parametrize("page", by_page())
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    save_hub_model(tmp_path / HUB[0])
    save_toy(tmp_path / "runs" / "french-small")
    export_checkpoint("runs/french-small", "exported")
    finetuned = {"reviews": FAT5ForSequenceClassification, "ner": FAT5ForTokenClassification}
    for name, head in finetuned.items():
        head.from_pretrained("runs/french-small", num_labels=2).save_pretrained(f"results/{name}/seed-0")
        small_tokenizer().save_pretrained(f"results/{name}/seed-0")
    names = names_of(page, tmp_path)
    for block in by_page()[page]:
        if any(name in block.text and importlib.util.find_spec(name) is None for name in OPTIONAL):
            continue
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(block.text, block.place, "exec"), names)
