"""Summarization: a short text that says what a long one says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fat5.data.table_files import Row
from fat5.tasks import columns
from fat5.tasks.columns import Field
from fat5.tasks.generation import GenerationOptions, GenerationTask
from fat5.tasks.metrics import rouge_scores
from fat5.tasks.task import Scores

_SENTENCE_END = re.compile(r"(?<=[.!?…])\s+|\n+")


@dataclass(frozen=True)
class SummarizationOptions(GenerationOptions):
    """What only summarization has.

    Attributes:
        max_length: Tokens of a document, special ones included; longer ones are cut at the end, with a warning.
        prefix: Text in front of each document, such as "summarize: ".
        max_target_length: Tokens of a summary in training, and of one that is generated.
        num_beams: Beams of the search; 1 for greedy search.
        no_repeat_ngram_size: No run of so many tokens is generated twice; 0 allows all.
    """

    max_length: int = 1024
    no_repeat_ngram_size: int = 3


class Summarization(GenerationTask):
    """ROUGE-L leads, beside ROUGE-1 and ROUGE-2."""

    name = "summarization"
    source, target = "document", "summary"
    fields = (
        Field("document", columns.text, ("text", "article", "dialogue", "content")),
        Field("summary", columns.text, ("highlights", "abstract", "headline", "title")),
    )
    metrics = ("rouge_l",)
    Options = SummarizationOptions

    def score(self, rows: Sequence[Row], predictions: Sequence[Any]) -> Scores:
        """Return the mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L."""
        return rouge_scores([row["summary"] for row in rows], predictions)

    def baselines(self, train: Sequence[Row], rows: Sequence[Row]) -> dict[str, list[Any]]:
        """Return the first sentence of each document, and its first three."""
        sentences = [[part for part in _SENTENCE_END.split(row["document"]) if part.strip()] for row in rows]
        return {
            "first sentence": [" ".join(parts[:1]) for parts in sentences],
            "first three sentences": [" ".join(parts[:3]) for parts in sentences],
        }
