"""The shipped settings load, and run on small files in the layout of the sets that they name."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from fat5.errors import ConfigError
from fat5.tasks.finetune import finetune
from fat5.tasks.settings import load_task_config
from tests.tasks.conftest import ROWS, entity_rows, question_rows, summary_rows, topic_rows, write_rows, write_task

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs" / "tasks").glob("*.yaml"))

# What the hub's sets call their columns and splits, where that is not what ours do.
LAYOUTS = {
    "allocine_clean": lambda: [{"review": row["text"], "label": row["label"]} for row in topic_rows(24)],
    "french_ner_4entities": lambda: [{"tokens": row["tokens"], "ner_tags": row["tags"]} for row in entity_rows(24)],
    "orange_sum": lambda: [{"text": row["document"], "summary": row["summary"]} for row in summary_rows(24)],
    "stsb_fr": lambda: [
        {"sentence1": f"Le chat {i}.", "sentence2": f"Un chien {i}.", "similarity_score": i % 6 / 1.2}
        for i in range(24)
    ],
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_settings_load_and_the_data_is_read(path, tmp_path):
    config = load_task_config(None, path)
    if path.stem in LAYOUTS:
        for split in ("train", "validation" if path.stem != "stsb_fr" else "dev", "test"):
            write_rows(tmp_path / "data" / f"{split}.jsonl", LAYOUTS[path.stem]())
        source = tmp_path / "data"
    else:
        source = write_task(tmp_path, config.task)
    from fat5.tasks.run import baseline_scores, open_task

    task, splits = open_task(load_task_config(None, path, [f"data.source={source}", "data.name=null"]), need_train=True)
    assert splits.train
    assert splits.test_name == "test"
    assert all(task.leading(scores) in scores for scores in baseline_scores(task, splits).values())


def test_there_is_a_file_for_every_task():
    assert {load_task_config(None, path).task for path in CONFIGS} == set(ROWS)


def load_example():
    spec = importlib.util.spec_from_file_location("long_task_data", ROOT / "examples" / "long_task_data.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_long_inputs_are_read_whole(checkpoint, tmp_path):
    example = load_example()
    rows = [row | {"split": split} for split in ("train", "valid", "test") for row in question_rows(6)]
    long = example.long_questions(rows, length=600)
    for row in long:
        (start,), (text,) = row["answers"]["answer_start"], row["answers"]["text"]
        assert row["context"][start : start + len(text)] == text
        assert row["context"].count(text) == 1
    assert min(len(row["context"]) for row in long) > 200
    assert example.long_summaries([{"document": "a" * 5}, {"document": "a" * 20}], length=10) == [
        {"document": "a" * 20}
    ]
    source = write_rows(tmp_path / "qa.jsonl", long)
    config = load_task_config(
        None,
        ROOT / "configs" / "tasks" / "long_qa_fr.yaml",
        [
            f"data.source={source}", f"model.checkpoint={checkpoint}", f"training.output_dir={tmp_path / 'out'}",
            "training.max_steps=1", "training.country=null", "training.save_model=false",
        ],
    )  # fmt: skip
    assert finetune(config).summary["scores"].keys() == {"exact_match", "f1"}


@pytest.mark.slow
def test_eight_thousand_tokens(checkpoint, tmp_path):
    """Memory is linear in the length, so a long document fits; on a CPU, with a toy model."""
    rows = [row | {"document": row["document"] * 3000, "split": row["id"]} for row in summary_rows(3)]
    for row, split in zip(rows, ("train", "valid", "test"), strict=True):
        row["split"] = split
    source = write_rows(tmp_path / "long.jsonl", rows)
    config = load_task_config(
        None,
        ROOT / "configs" / "tasks" / "long_summary_fr.yaml",
        [
            f"data.source={source}", f"model.checkpoint={checkpoint}", f"training.output_dir={tmp_path / 'out'}",
            "training.max_steps=1", "training.country=null", "training.save_model=false",
            "options.max_target_length=4", "options.max_length=8192", "training.gradient_accumulation_steps=1",
        ],
    )  # fmt: skip
    assert finetune(config).summary["scores"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lora.rank=many", "lora.rank is 'many', expected int"),
        ("lora.rank=0", "lora: expected rank >= 1 and dropout in [0, 1), got 0 and 0.0"),
    ],
)
def test_a_wrong_setting_of_adapters_is_named(override, message):
    with pytest.raises(ConfigError) as raised:
        load_task_config("classification", None, [override])
    assert str(raised.value) == message
