"""One task on one model, and its simple methods, each kept so that a second command goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

Row = TypeVar("Row", bound=Mapping[str, Any])

MODELS = ("pretrained", "random")
TASKS = ("topic_fr", "entities_fr", "qa_fr", "similarity_fr", "summary_fr", "translation_en_fr")
"""Files of configs/tasks and of the data; those of the encoder alone first."""

LEAK_COLUMNS = {
    "topic_fr": ["text"],
    "summary_fr": ["document"],
    "qa_fr": ["context"],
    "entities_fr": ["tokens"],
    "similarity_fr": ["sentence1", "sentence2"],
    "translation_en_fr": ["fr"],
}
MAX_COVERED = 0.01
"""Share of held-out documents that may consist of paragraphs that many documents share."""


def task_config(name: str, data: Path, work: Path, model: str, checkpoint: str, overrides: Sequence[str]) -> Any:
    """Return the settings of a task on a model."""
    from fat5.tasks.settings import load_task_config

    settings = Path(__file__).resolve().parents[2] / "configs" / "tasks" / f"{name}.yaml"
    own = [
        f"data.source={data / 'tasks' / f'{name}.parquet'}",
        f"model.checkpoint={checkpoint}",
        f"model.from_scratch={str(model == 'random').lower()}",
        f"training.output_dir={work / 'finetuned' / name / model}",
        "training.save_model=false",
        "training.country=null",
    ]
    return load_task_config(None, settings, [*own, *overrides])


def simple_methods(name: str, config: Any, work: Path) -> dict[str, dict[str, float]]:
    """Return the scores of a task's simple methods by their names."""
    from fat5.tasks.run import baseline_scores, open_task

    path = work / "finetuned" / name / "baselines.json"
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    scores = baseline_scores(*open_task(config, need_train=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(scores, indent=1, ensure_ascii=False), encoding="utf-8")
    return scores


def row_of(name: str, model: str, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the benchmark's row of a finetuning."""
    metric, runs = summary["metric"], summary["runs"]
    score = summary["scores"][metric]
    peaks = [run["peak_mib"] for run in runs if run["peak_mib"] is not None]
    others = {key: value["mean"] for key, value in summary["scores"].items() if "/" not in key and key != metric}
    return {
        "table": "tasks",
        "task": name,
        "implementation": model,
        "status": "ok",
        "metric": metric,
        "score": score["mean"],
        "spread": score["spread"],
        "seeds": len(runs),
        "steps": runs[0]["steps"],
        "seconds": sum(run["seconds"] for run in runs) / len(runs),
        "peak_mib": max(peaks) if peaks else None,
        "other_scores": json.dumps({key: round(value, 2) for key, value in others.items()}),
    }


def baseline_row(name: str, method: str, scores: Mapping[str, float], metric: str) -> dict[str, Any]:
    """Return the benchmark's row of a simple method."""
    return {
        "table": "tasks",
        "task": name,
        "implementation": method,
        "status": "ok",
        "metric": metric,
        "score": scores[metric],
    }


def newest_scores(rows: Sequence[Row]) -> list[Row]:
    """Return of rows on file the newest score of each task and model."""
    newest: dict[tuple[Any, Any], Row] = {}
    for row in sorted(rows, key=lambda row: str(row["date"])):
        if row["table"] == "tasks" and row.get("score") not in (None, ""):
            newest[row["task"], row["implementation"]] = row
    return list(newest.values())


def find_leaks(corpus: str, data: str, names: Sequence[str]) -> dict[str, tuple[int, int, str]]:
    """Return for each task its leaks, the documents of shared paragraphs beyond the share allowed, and the report."""
    import pyarrow.parquet as pq

    from fat5.tasks.leaks import index_corpus

    index = index_corpus(pq.read_table(corpus, columns=["text"])["text"].to_pylist())
    found = {}
    for name in names:
        rows = pq.read_table(Path(data) / "tasks" / f"{name}.parquet").to_pylist()
        report = index.find([row for row in rows if row["split"] != "train"], LEAK_COLUMNS[name])
        covered = max(0, len(report.covered) - int(MAX_COVERED * report.documents))
        found[name] = (len(report.ids) + len(report.texts), covered, str(report))
    return found
