"""Extractive question answering: the span of a context that answers a question, or none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from fat5.data.table_files import Row
from fat5.errors import ConfigError, DataError
from fat5.tasks import columns
from fat5.tasks.columns import Field
from fat5.tasks.encoding import EncoderOptions, unbatched, warn_of_cuts
from fat5.tasks.metrics import answer_scores, normalize_answer
from fat5.tasks.task import Feature, Head, Inference, Scores, Task

_CANDIDATES = 20
"""Starts and ends of a window that are combined; as in the SQuAD recipe of Transformers."""


@dataclass(frozen=True)
class QuestionAnsweringOptions(EncoderOptions):
    """What only question answering has.

    Attributes:
        max_length: Tokens of a window, the question included; a longer context is read in several.
        prefix: Text in front of each question.
        stride: Tokens of the context that two windows share.
        max_answer_length: Tokens of the longest answer.
    """

    stride: int = 128
    max_answer_length: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.stride <= self.max_length // 4:
            raise ConfigError(
                f"options.stride is {self.stride}, expected 0 to {self.max_length // 4}, a quarter of "
                "options.max_length; the question may take another quarter"
            )
        if self.max_answer_length < 1:
            raise ConfigError(f"options.max_answer_length is {self.max_answer_length}, expected at least 1")


class Answers(NamedTuple):
    """The right answers of a row with their places in the context; none where there is no answer."""

    texts: list[str]
    starts: list[int]


class _Window(NamedTuple):
    feature: Feature
    row: int
    offsets: list[tuple[int, int] | None]
    """Place in the context of each token of it, None for other tokens."""


class QuestionAnswering(Task):
    """Token F1 leads. Training rows without an answer teach the model to give none, as in SQuAD 2."""

    name = "question-answering"

    @staticmethod
    def _answers(value: Any) -> Answers:
        if not isinstance(value, Mapping) or not {"text", "answer_start"} <= value.keys():
            raise ValueError(f"expected {{text: [...], answer_start: [...]}} as in SQuAD, got {str(value)[:60]!r}")
        texts, starts = value["text"], value["answer_start"]
        if isinstance(texts, str):
            texts, starts = [texts], [starts]
        if len(texts) != len(starts):
            raise ValueError(f"expected a start for each answer, got {len(texts)} answers and {len(starts)} starts")
        # Some sets write an empty answer where there is none.
        kept = [(str(text), int(start)) for text, start in zip(texts, starts, strict=True) if text]
        return Answers([text for text, _ in kept], [start for _, start in kept])

    fields = (
        Field("question", columns.text, ("query",)),
        Field("context", columns.text, ("passage", "document")),
        Field("answers", lambda value: QuestionAnswering._answers(value), ("answer",)),
    )
    head = Head("AutoModelForQuestionAnswering", "FAT5ForQuestionAnswering", ("qa_outputs",))
    metrics = ("f1",)
    Options = QuestionAnsweringOptions

    def encode(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[Feature]:
        """Return the ids of each window with the answer's first and last token; the first token for no answer."""
        _check_answers(rows)
        features = []
        for window in self._windows(rows, tokenizer):
            start, end = _token_span(window.offsets, rows[window.row]["answers"])
            features.append(window.feature | {"start_positions": start, "end_positions": end})
        return features

    def predict(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], inference: Inference
    ) -> list[Any]:
        """Return the text of each row's best span over all its windows, "" where no answer scores above every span.

        A span's score is start logit + end logit, less the window's score for no answer, which makes the scores of
        windows comparable. No answer is given only where the rows hold questions without one.
        """
        windows = self._windows(rows, tokenizer)
        logits = inference.map(
            [window.feature for window in windows],
            lambda features: self.collate(features, tokenizer),
            lambda batch: _cut(model(**batch), batch),
        )
        may_refuse = any(not row["answers"].texts for row in rows)
        best: dict[int, tuple[float, str]] = {}
        for window, (start, end) in zip(windows, logits, strict=True):
            score, span = self._best_span(start, end, window.offsets)
            if span is not None and score > best.get(window.row, (-torch.inf, ""))[0]:
                best[window.row] = (score, rows[window.row]["context"][span[0] : span[1]].strip())
        none = (0.0, "")
        found = [best.get(index, none) for index in range(len(rows))]
        return ["" if may_refuse and score < 0.0 else answer for score, answer in found]

    def score(self, rows: Sequence[Row], predictions: Sequence[Any]) -> Scores:
        """Return exact match and token F1."""
        return answer_scores([row["answers"].texts for row in rows], predictions)

    def baselines(self, train: Sequence[Row], rows: Sequence[Row]) -> dict[str, list[Any]]:
        """Return the sentence of the context that shares most words with the question."""
        return {"sentence with most words of the question": [_closest_sentence(row) for row in rows]}

    def _best_span(
        self, start: torch.Tensor, end: torch.Tensor, offsets: Sequence[tuple[int, int] | None]
    ) -> tuple[float, tuple[int, int] | None]:
        inside = torch.tensor([place is not None for place in offsets])
        count = min(_CANDIDATES, int(inside.sum()))
        starts = start.masked_fill(~inside, -torch.inf).topk(count).indices.tolist()
        ends = end.masked_fill(~inside, -torch.inf).topk(count).indices.tolist()
        spans = [
            (float(start[first] + end[last]), first, last)
            for first in starts
            for last in ends
            if first <= last < first + self.options.max_answer_length
        ]
        if not spans:
            return -torch.inf, None
        score, first, last = max(spans)
        begin, finish = offsets[first], offsets[last]
        if begin is None or finish is None:
            return -torch.inf, None
        return score - float(start[0] + end[0]), (begin[0], finish[1])

    def _windows(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[_Window]:
        limit = self.options.max_length // 4
        questions = [self.options.prefix + row["question"] for row in rows]
        ids = tokenizer(questions, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        long = [index for index, tokens in enumerate(ids["input_ids"]) if len(tokens) > limit]
        if long:
            warn_of_cuts(len(long), len(rows), "questions", "a quarter of options.max_length", limit)
        for index in long:
            questions[index] = questions[index][: ids["offset_mapping"][index][limit - 1][1]]
        encoded = tokenizer(
            questions,
            [row["context"] for row in rows],
            truncation="only_second",
            max_length=self.options.max_length,
            stride=self.options.stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        windows = []
        for place, feature in enumerate(unbatched(encoded)):
            places = zip(encoded["offset_mapping"][place], encoded.sequence_ids(place), strict=True)
            offsets = [tuple(offset) if part == 1 else None for offset, part in places]
            windows.append(_Window(feature, encoded["overflow_to_sample_mapping"][place], offsets))
        return windows


def _check_answers(rows: Sequence[Row]) -> None:
    for index, row in enumerate(rows):
        for answer, start in zip(*row["answers"], strict=True):
            found = row["context"][start : start + len(answer)]
            if found != answer:
                raise DataError(
                    f"row {index:,}: answer_start {start} points at {found[:40]!r}, expected the answer "
                    f"{answer[:40]!r}; starts are counted in characters of the context"
                )


def _token_span(offsets: Sequence[tuple[int, int] | None], answers: Answers) -> tuple[int, int]:
    """Return first and last token of the first answer, (0, 0) where the window does not hold all of it."""
    if not answers.texts:
        return 0, 0
    begin, end = answers.starts[0], answers.starts[0] + len(answers.texts[0])
    places = [(index, place) for index, place in enumerate(offsets) if place is not None and place[0] < place[1]]
    touching = [index for index, (first, last) in places if first < end and last > begin]
    if not touching or places[0][1][0] > begin or places[-1][1][1] < end:
        return 0, 0
    return touching[0], touching[-1]


def _cut(output: Any, batch: Mapping[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    lengths = batch["attention_mask"].sum(1).tolist()
    start, end = output.start_logits.float().cpu(), output.end_logits.float().cpu()
    return [(start[row, :length], end[row, :length]) for row, length in enumerate(lengths)]


def _closest_sentence(row: Row) -> str:
    asked = set(normalize_answer(row["question"]).split())
    sentences = [part.strip() for part in re.split(r"(?<=[.!?])\s+|\n+", row["context"]) if part.strip()]
    counts = [sum((Counter(asked) & Counter(set(normalize_answer(part).split()))).values()) for part in sentences]
    return sentences[counts.index(max(counts))]
