"""Small files under the names that the pages use."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml

from fat5 import FAT5Config, FAT5ForConditionalGeneration
from fat5.data.sample import sample_documents
from fat5.training.checkpoints import seal_checkpoint
from tests.data.small_tokenizer import small_tokenizer
from tests.models.t5_families import save_t5
from tests.tasks.conftest import TOY, topic_rows, translation_rows, write_rows, write_task

from .markdown import ROOT

HUB = ("google/flan-t5-small", "google/flan-t5-base")
PRETRAINING = (
    *(f"model.{name}={value}" for name, value in TOY.items()),
    "model.num_decoder_layers=1",
    "model.vocab_size=null",
    "training.max_tokens=null",
    "training.max_steps=2",
    "training.eval_batches=1",
    "training.compile=false",
    "training.num_workers=0",
    "training.device=cpu",
    "training.report_to=[]",
    "denoising.max_input_length=64",
    "denoising.max_target_length=64",
    "denoising.encoder_budget=384",
)
"""What makes a pretraining a toy; the rest of its settings stays."""
FINETUNING = (
    "training.epochs=1",
    "training.max_steps=2",
    "training.batch_size=4",
    "training.gradient_accumulation_steps=1",
    "training.eval_every=null",
    "training.country=null",
    "training.device=cpu",
    "options.max_length=64",
)


def toy_model(vocab_size: int) -> FAT5ForConditionalGeneration:
    """Return a random model that fits `small_tokenizer`."""
    torch.manual_seed(0)
    return FAT5ForConditionalGeneration(FAT5Config(vocab_size=vocab_size, decoder_start_token_id=0, **TOY))


def save_toy(folder: Path) -> None:
    """Write a model and its tokenizer, as a pretraining leaves them."""
    tokenizer = small_tokenizer()
    toy_model(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_hub_model(folder: Path) -> None:
    """Write a T5 and its tokenizer, as Transformers does."""
    # As many layers on both sides: with more in the decoder, Transformers' own cache fails.
    save_t5("flan-t5", folder, vocab_size=1024, num_decoder_layers=2)
    small_tokenizer().save_pretrained(folder)


def save_trained(folder: Path) -> None:
    """Write what a pretraining leaves: a model, its tokenizer, and a checkpoint."""
    save_toy(folder)
    save_toy(folder / "checkpoint-2")
    seal_checkpoint(folder / "checkpoint-2", {"tokens_seen": 640})


def place(folder: Path) -> None:
    """Write the corpora, tables and models of the hub that the pages name."""
    for name in ("configs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    documents = [{"text": text} for text in islice(sample_documents(), 120)]
    write_rows(folder / "my_corpus.jsonl", documents)
    write_rows(folder / "corpus" / "a.jsonl", documents[:60])
    write_rows(folder / "corpus" / "b.jsonl", documents[60:])
    settings = {"training": {"output_dir": "run", "max_steps": 2}, "data": {"train": "tokens/train"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    write_rows(folder / "reviews.jsonl", [r | {"split": s} for s in ("train", "valid", "test") for r in topic_rows(12)])
    pq.write_table(pa.Table.from_pylist(translation_rows(24)), folder / "pairs.parquet")
    write_rows(folder / "questions.jsonl", [{"question": "Qui ?"}, {"question": "Où <extra_id_0> ?"}])
    (folder / "texts.txt").write_text("Le contrat.\nLa loi <extra_id_0>.\n", encoding="utf-8")
    data = folder / "data" / "tasks"
    for name, task in (("topic_fr", "classification"), ("qa_fr", "question-answering")):
        rows = [json.loads(line) for line in write_task(data, task).read_text(encoding="utf-8").splitlines()]
        pq.write_table(pa.Table.from_pylist(rows), data / f"{name}.parquet")
    for name in HUB:
        save_hub_model(folder / name)
