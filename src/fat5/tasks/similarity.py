"""Similarity: a vector for each sentence, whose cosine tells how alike two of them are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from fat5.data.table_files import Row
from fat5.errors import ConfigError, DataError, FAT5Error
from fat5.tasks import columns
from fat5.tasks.columns import Field
from fat5.tasks.encoding import EncoderOptions, encode_texts
from fat5.tasks.extras import require
from fat5.tasks.metrics import similarity_scores
from fat5.tasks.task import Batch, Feature, Head, Inference, Scores, Task, pad_features


@dataclass(frozen=True)
class SimilarityOptions(EncoderOptions):
    """What only similarity has.

    Attributes:
        max_length: Tokens of a sentence, special ones included; longer ones are cut at the end, with a warning.
        prefix: Text in front of each sentence.
        scale: Factor of the cosines in the loss: the higher, the more the hardest pairs of a batch decide.
    """

    max_length: int = 256
    scale: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.scale > 0:
            raise ConfigError(f"options.scale is {self.scale}, expected more than 0")


class Similarity(Task):
    """Average precision leads where the labels are 0 and 1, Spearman's rank correlation elsewhere.

    The loss is CoSENT's: over all pairs i, j of pairs of sentences in a batch of which i has the lower label,

        log(1 + sum_ij exp(scale * (cos_i - cos_j)))

    It asks for an order alone, so that labels of any scale serve.
    """

    name = "similarity"
    fields = (
        Field("sentence1", columns.text, ("text1", "premise", "question1", "sentence_A", "anchor")),
        Field("sentence2", columns.text, ("text2", "hypothesis", "question2", "sentence_B", "positive")),
        Field("label", columns.number, ("score", "similarity_score", "labels", "relatedness_score", "is_duplicate")),
    )
    head = Head("AutoModelForTextEncoding", "FAT5ForTextEmbedding")
    metrics = ("average_precision", "spearman")
    Options = SimilarityOptions

    def learn_labels(self, rows: Sequence[Row]) -> None:
        """Raise where the training rows all have one label, which leaves no order to learn."""
        super().learn_labels(rows)
        if len({row["label"] for row in rows}) < 2:
            raise DataError(f"all training rows have the label {rows[0]['label']:g}; expected at least two grades")

    def encode(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[Feature]:
        """Return both sentences' ids and the label of each pair; the second's names end in `_2`."""
        first = encode_texts([row["sentence1"] for row in rows], tokenizer, self.options)
        second = encode_texts([row["sentence2"] for row in rows], tokenizer, self.options)
        return [
            {**one, **{f"{name}_2": value for name, value in two.items()}, "labels": row["label"]}
            for one, two, row in zip(first, second, rows, strict=True)
        ]

    def collate(self, features: Sequence[Feature], tokenizer: PreTrainedTokenizerBase) -> Batch:
        """Return [2B, L] tensors, the first sentences before the second, and float labels [B] where there are some."""
        names = [name for name in features[0] if name != "labels" and not name.endswith("_2")]
        sentences = [{name: feature[name] for name in names} for feature in features]
        if f"{names[0]}_2" in features[0]:
            sentences += [{name: feature[f"{name}_2"] for name in names} for feature in features]
        batch = pad_features(sentences, tokenizer)
        if "labels" in features[0]:
            batch["labels"] = torch.tensor([feature["labels"] for feature in features], dtype=torch.float32)
        return batch

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Return the CoSENT loss of a batch; 0 where all its labels are equal."""
        batch = dict(batch)
        labels = batch.pop("labels")
        first, second = embed(model, batch).float().chunk(2)
        cosines = (first * second).sum(-1) * self.options.scale
        differences = cosines[:, None] - cosines[None, :]  # [i, j] = cos_i - cos_j
        differences = differences.masked_fill(labels[:, None] >= labels[None, :], -torch.inf)
        return torch.logsumexp(F.pad(differences.flatten(), (1, 0)), 0)

    def predict(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], inference: Inference
    ) -> list[Any]:
        """Return the cosine of each pair.

        Raises:
            FAT5Error: One is not finite.
        """
        sentences = [row[name] for name in ("sentence1", "sentence2") for row in rows]
        vectors = inference.map(
            encode_texts(sentences, tokenizer, self.options),
            lambda features: self.collate(features, tokenizer),
            lambda batch: embed(model, batch).float().cpu(),
        )
        first, second = torch.stack(vectors).chunk(2)
        cosines = (first * second).sum(-1)
        if not cosines.isfinite().all():
            raise FAT5Error("the model's embeddings are not finite: its training has diverged; lower optimizer.lr")
        return cosines.tolist()

    def score(self, rows: Sequence[Row], predictions: Sequence[Any]) -> Scores:
        """Return Spearman's rank correlation and, for labels 0 and 1, the average precision."""
        return similarity_scores([row["label"] for row in rows], predictions)

    def baselines(self, train: Sequence[Row], rows: Sequence[Row]) -> dict[str, list[Any]]:
        """Return the cosine of the sentences' TF-IDF vectors, the word weights taken from the training sentences."""
        features: Any = require("sklearn.feature_extraction.text", "tasks", "the baseline of similarity")
        vectorizer = features.TfidfVectorizer(sublinear_tf=True)
        vectorizer.fit([row[name] for row in train or rows for name in ("sentence1", "sentence2")])
        first, second = (vectorizer.transform([row[name] for row in rows]) for name in ("sentence1", "sentence2"))
        return {"tf-idf cosine": [float(value) for value in first.multiply(second).sum(axis=1).A1]}


def embed(model: Any, batch: Batch) -> Tensor:
    """Return a vector of length 1 for each text: the model's own, or the mean of its states over the real tokens."""
    output = model(**batch)
    vectors = getattr(output, "embeddings", None)
    if vectors is None:
        states, mask = output.last_hidden_state, batch["attention_mask"][..., None]
        # Means in fp32: bf16 would lose the small differences that cosines are about.
        vectors = (states.float() * mask).sum(1) / mask.sum(1).clamp_min(1)
    return F.normalize(vectors.float(), dim=-1)
