"""A toy tokenizer and checkpoint, and small data sets in the layouts of the real ones."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fat5.data.tokenizer import save_tokenizer
from fat5.models import FAT5Config, FAT5ForConditionalGeneration
from fat5.tasks.settings import TaskConfig, load_task_config
from tests.data.small_tokenizer import small_tokenizer

TOY = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}

ANIMALS = ["chat", "chien", "cheval", "lapin"]
TOOLS = ["marteau", "rabot", "tournevis", "burin"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy encoder-decoder with its tokenizer, as a pretraining leaves it."""
    folder = tmp_path_factory.mktemp("toy") / "model"
    tokenizer = small_tokenizer()
    save_tokenizer(tokenizer, folder)
    torch.manual_seed(7)
    config = FAT5Config(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
        **TOY,
    )
    FAT5ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def topic_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Texts about animals or tools."""
    draw = random.Random(seed)
    rows = []
    for index in range(count):
        label, words = draw.choice([("animaux", ANIMALS), ("outils", TOOLS)])
        rows.append(
            {"id": f"F{seed}-{index}", "text": f"Voici le {draw.choice(words)} numéro {index}.", "label": label}
        )
    return rows


def entity_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Sentences whose animals and tools are marked."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        animal, tool = draw.choice(ANIMALS), draw.choice(TOOLS)
        rows.append(
            {
                "tokens": ["Le", "grand", animal, "prend", "un", tool, "."],
                "tags": ["O", "B-animal", "I-animal", "O", "O", "B-outil", "O"],
            }
        )
    return rows


def question_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Contexts that say who holds what."""
    draw = random.Random(seed)
    rows = []
    for index in range(count):
        animal, tool = draw.choice(ANIMALS), draw.choice(TOOLS)
        context = f"Il était une fois dans la forêt.\nLe {animal} tient le {tool}. Il pleut."
        answers = {"text": [tool], "answer_start": [context.index(tool)]}
        rows.append({"id": str(index), "question": f"Que tient le {animal} ?", "context": context, "answers": answers})
    return rows


def pair_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Pairs of sentences, alike or not."""
    draw = random.Random(seed)
    rows = []
    for index in range(count):
        one, other = draw.choice(ANIMALS), draw.choice(TOOLS)
        second = f"Voilà un {one}." if index % 2 else f"Voilà un {other}."
        rows.append({"sentence1": f"C'est le {one} du voisin.", "sentence2": second, "label": index % 2})
    return rows


def summary_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Documents of two sentences with the first as their summary."""
    draw = random.Random(seed)
    rows = []
    for index in range(count):
        first = f"Le {draw.choice(ANIMALS)} mange."
        rows.append({"id": str(index), "document": f"{first} Il est {index} heures.", "summary": first})
    return rows


def translation_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Pairs in two languages."""
    draw = random.Random(seed)
    return [{"en": f"tool {tool}", "fr": f"outil {tool}"} for tool in (draw.choice(TOOLS) for _ in range(count))]


ROWS = {
    "classification": topic_rows,
    "token-classification": entity_rows,
    "question-answering": question_rows,
    "similarity": pair_rows,
    "summarization": summary_rows,
    "seq2seq": translation_rows,
}
COLUMNS = {"seq2seq": ["data.columns.source=en", "data.columns.target=fr"]}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_task(folder: Path, task: str, train: int = 24, other: int = 8) -> Path:
    """Write a table with a column `split`, in the layout of the French sets."""
    make = ROWS[task]
    rows = [
        row | {"split": split}
        for seed, (split, count) in enumerate((("train", train), ("valid", other), ("test", other)))
        for row in make(count, seed)
    ]
    return write_rows(folder / f"{task}.jsonl", rows)


def toy_config(task: str, data: Path | None, *settings: str) -> TaskConfig:
    """Return settings of a short training on the CPU."""
    short = ["training.epochs=1", "training.batch_size=8", "training.country=null", "training.save_model=false"]
    length = "options.max_length=64"
    source = [] if data is None else [f"data.source={data}"]
    extra = ["options.stride=8"] if task in ("token-classification", "question-answering") else []
    target = ["options.max_target_length=8"] if task in ("summarization", "seq2seq") else []
    return load_task_config(task, None, [*short, *source, length, *extra, *target, *COLUMNS.get(task, []), *settings])
