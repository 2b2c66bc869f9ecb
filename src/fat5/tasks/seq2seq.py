"""Any text to any text: translation, instructions, or a task of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fat5.data.table_files import Row
from fat5.tasks import columns
from fat5.tasks.columns import Field
from fat5.tasks.generation import GenerationTask
from fat5.tasks.metrics import translation_scores
from fat5.tasks.task import Scores


class Seq2Seq(GenerationTask):
    """ChrF leads, beside BLEU."""

    name = "seq2seq"
    source, target = "source", "target"
    fields = (
        Field("source", columns.text, ("input", "inputs", "instruction", "prompt", "src")),
        Field("target", columns.text, ("output", "outputs", "response", "completion", "tgt")),
    )
    metrics = ("chrf",)

    def score(self, rows: Sequence[Row], predictions: Sequence[Any]) -> Scores:
        """Return chrF and BLEU."""
        return translation_scores([row["target"] for row in rows], predictions)

    def baselines(self, train: Sequence[Row], rows: Sequence[Row]) -> dict[str, list[Any]]:
        """Return the source as it is."""
        return {"copy of the source": [row["source"] for row in rows]}
