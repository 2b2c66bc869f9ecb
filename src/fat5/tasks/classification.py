"""Classification: one class of several for each text, or for each pair of texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from fat5.data.table_files import Row
from fat5.errors import DataError
from fat5.tasks import columns
from fat5.tasks.columns import Field
from fat5.tasks.encoding import EncoderOptions, encode_texts
from fat5.tasks.extras import require
from fat5.tasks.metrics import classification_scores
from fat5.tasks.task import Feature, Head, Inference, Scores, Task, class_names


@dataclass(frozen=True)
class ClassificationOptions(EncoderOptions):
    """What only classification has.

    Attributes:
        max_length: Tokens of a text, special ones included; longer texts are cut at the end, with a warning.
        prefix: Text in front of each input.
    """


class Classification(Task):
    """Accuracy leads; the F1 of each class is reported, too."""

    name = "classification"
    fields = (
        Field("text", columns.text, ("sentence", "review", "content", "premise", "sentence1", "document")),
        Field("label", columns.label, ("labels", "class", "target", "topic", "category", "polarity")),
        Field("text_pair", columns.text, ("hypothesis", "sentence2"), optional=True),
    )
    head = Head(
        "AutoModelForSequenceClassification",
        "FAT5ForSequenceClassification",
        ("classifier", "classification_head", "score", "pre_classifier"),
    )
    metrics = ("accuracy",)
    Options = ClassificationOptions

    def learn_labels(self, rows: Sequence[Row]) -> None:
        """Number the classes of the training rows in the order of their names."""
        self.labels = sorted({row["label"] for row in rows})
        if len(self.labels) < 2:
            raise DataError(f"all training rows have the label {self.labels[0]!r}; expected at least two classes")

    def adopt_labels(self, config: Any, rows: Sequence[Row]) -> None:
        """Take the model's classes."""
        self.labels = class_names(config, self.name, sorted({row["label"] for row in rows}))

    def unseen_labels(self, rows: Sequence[Row]) -> list[str]:
        """Return the classes of `rows` that the model does not know."""
        return sorted({row["label"] for row in rows} - set(self.labels or []))

    def encode(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[Feature]:
        """Return ids and the number of the class."""
        number = {name: index for index, name in enumerate(self.labels or [])}
        features = self._inputs(rows, tokenizer)
        return [feature | {"labels": number[row["label"]]} for feature, row in zip(features, rows, strict=True)]

    def predict(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], inference: Inference
    ) -> list[Any]:
        """Return the name of the likeliest class for each row."""
        labels = self.labels or []
        chosen = inference.map(
            self._inputs(rows, tokenizer),
            lambda features: self.collate(features, tokenizer),
            lambda batch: model(**batch).logits.argmax(-1).tolist(),
        )
        return [labels[index] for index in chosen]

    def score(self, rows: Sequence[Row], predictions: Sequence[Any]) -> Scores:
        """Return accuracy, macro F1 and the F1 of each class."""
        return classification_scores([row["label"] for row in rows], predictions)

    def baselines(self, train: Sequence[Row], rows: Sequence[Row]) -> dict[str, list[Any]]:
        """Return the most frequent class, and TF-IDF over words and pairs of words with logistic regression."""
        majority = Counter(row["label"] for row in train).most_common(1)[0][0]
        features: Any = require("sklearn.feature_extraction.text", "tasks", "the baseline of classification")
        linear: Any = require("sklearn.linear_model", "tasks", "the baseline of classification")
        pipeline: Any = require("sklearn.pipeline", "tasks", "the baseline of classification")
        model = pipeline.make_pipeline(
            features.TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), max_features=200_000),
            linear.LogisticRegression(C=10.0, max_iter=1000),
        )
        model.fit([_joined(row) for row in train], [row["label"] for row in train])
        guesses = model.predict([_joined(row) for row in rows])
        return {"majority": [majority] * len(rows), "tf-idf + logistic regression": [str(guess) for guess in guesses]}

    def _inputs(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[Feature]:
        pairs = [row["text_pair"] for row in rows] if rows[0]["text_pair"] is not None else None
        return encode_texts([row["text"] for row in rows], tokenizer, self.options, pairs)


def _joined(row: Row) -> str:
    return row["text"] if row["text_pair"] is None else f"{row['text']}\n{row['text_pair']}"
