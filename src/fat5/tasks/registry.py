"""The tasks by name, each imported only when it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, NamedTuple

from fat5.errors import ConfigError, nearest

if TYPE_CHECKING:
    from fat5.tasks.task import Task


class _Entry(NamedTuple):
    module: str
    cls: str
    help: str


TASKS = {
    "classification": _Entry("classification", "Classification", "one class of several for each text"),
    "token-classification": _Entry("token_classification", "TokenClassification", "a tag for each word, such as names"),
    "question-answering": _Entry("question_answering", "QuestionAnswering", "the span of a text that answers"),
    "similarity": _Entry("similarity", "Similarity", "embeddings whose cosine tells how alike two sentences are"),
    "summarization": _Entry("summarization", "Summarization", "a short text that says what a long one says"),
    "seq2seq": _Entry("seq2seq", "Seq2Seq", "any text to any text: translation, instructions"),
}
"""Name of a task to its module in this package, its class, and its line in `fat5 finetune --help`."""


def task_class(name: str) -> type[Task]:
    """Return the class of a task.

    Raises:
        ConfigError: There is no such task; the message names the nearest.
    """
    if name not in TASKS:
        raise ConfigError(f"no task {name!r}; expected one of {', '.join(TASKS)}{nearest(name, TASKS)}")
    entry = TASKS[name]
    return getattr(importlib.import_module(f"fat5.tasks.{entry.module}"), entry.cls)
