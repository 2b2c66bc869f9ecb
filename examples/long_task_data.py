"""Make two data sets of long inputs from the French task sets: `python examples/long_task_data.py TASKS OUTPUT`.

summary_fr.jsonl: the documents of `summary_fr.parquet` from 12,000 characters on, whole. qa_fr.jsonl: each question of
`qa_fr.parquet` with its context hidden among contexts of other rows of the same split, 30,000 characters in all.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fat5.data.table_files import read_table
from fat5.files import atomic_file

LONG_DOCUMENT, LONG_CONTEXT = 12_000, 30_000


def long_summaries(rows: Iterable[dict[str, Any]], length: int = LONG_DOCUMENT) -> list[dict[str, Any]]:
    """Return the rows whose document has at least so many characters."""
    return [row for row in rows if len(row["document"]) >= length]


def long_questions(rows: list[dict[str, Any]], length: int = LONG_CONTEXT) -> list[dict[str, Any]]:
    """Return the rows with their context among others of the split, and the places of the answers moved along.

    A context that holds one of the row's answers, too, is left out: the question would have two right places.
    """
    draw = random.Random(0)
    result = []
    for row in rows:
        answers = row["answers"]
        others = [
            other["context"]
            for other in rows
            if other["split"] == row["split"] and not any(text in other["context"] for text in answers["text"])
        ]
        draw.shuffle(others)
        parts = [row["context"]]
        while others and sum(map(len, parts)) < length:
            parts.append(others.pop())
        place = draw.randrange(len(parts))
        parts[0], parts[place] = parts[place], parts[0]
        offset = sum(len(part) + 1 for part in parts[:place])
        moved = {"text": answers["text"], "answer_start": [start + offset for start in answers["answer_start"]]}
        result.append({**row, "context": "\n".join(parts), "answers": moved})
    return result


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    with atomic_file(path) as staging:
        staging.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows):,} rows")


def main() -> None:
    """Make both sets."""
    parser = argparse.ArgumentParser(description="Make two data sets of long inputs from the French task sets.")
    parser.add_argument("tasks", type=Path, help="folder of summary_fr.parquet and qa_fr.parquet")
    parser.add_argument("output", type=Path, help="folder for summary_fr.jsonl and qa_fr.jsonl")
    arguments = parser.parse_args()
    write_rows(
        arguments.output / "summary_fr.jsonl", long_summaries(read_table(arguments.tasks / "summary_fr.parquet"))
    )
    write_rows(arguments.output / "qa_fr.jsonl", long_questions(read_table(arguments.tasks / "qa_fr.parquet")))


if __name__ == "__main__":
    main()
