"""Token classification: a tag for each word."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from fat5.data.table_files import Row
from fat5.errors import ConfigError, DataError
from fat5.tasks import columns
from fat5.tasks.columns import Field
from fat5.tasks.encoding import EncoderOptions, unbatched
from fat5.tasks.metrics import entity_scores
from fat5.tasks.task import IGNORE_INDEX, Feature, Head, Inference, Scores, Task, class_names

_OUTSIDE = "O"


@dataclass(frozen=True)
class TokenClassificationOptions(EncoderOptions):
    """What only token classification has.

    Attributes:
        max_length: Tokens of a window, special ones included; a longer sentence is read in several.
        prefix: Text in front of each sentence; it has no tags.
        stride: Tokens that two windows of a sentence share.
    """

    stride: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.stride <= self.max_length // 2:
            raise ConfigError(
                f"options.stride is {self.stride}, expected 0 to {self.max_length // 2}, half of options.max_length"
            )


class TokenClassification(Task):
    """F1 over whole entities leads. The first token of a word carries its tag."""

    name = "token-classification"
    fields = (
        Field("tokens", columns.words, ("words",)),
        Field("tags", columns.words, ("ner_tags", "labels", "pos_tags", "ner", "upos")),
    )
    head = Head("AutoModelForTokenClassification", "FAT5ForTokenClassification", ("classifier",))
    metrics = ("f1",)
    Options = TokenClassificationOptions

    def learn_labels(self, rows: Sequence[Row]) -> None:
        """Number the tags of the training rows in the order of their names."""
        _check_pairs(rows)
        self.labels = sorted({tag for row in rows for tag in row["tags"]})
        if self.labels == [_OUTSIDE]:
            raise DataError(f"all training words have the tag {_OUTSIDE!r}; expected entities among them")

    def adopt_labels(self, config: Any, rows: Sequence[Row]) -> None:
        """Take the model's tags."""
        _check_pairs(rows)
        self.labels = class_names(config, self.name, sorted({tag for row in rows for tag in row["tags"]}))

    def unseen_labels(self, rows: Sequence[Row]) -> list[str]:
        """Return the tags of `rows` that the model does not know."""
        _check_pairs(rows)
        return sorted({tag for row in rows for tag in row["tags"]} - set(self.labels or []))

    def encode(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[Feature]:
        """Return the ids of each window, and a tag at the first token of each word, -100 elsewhere."""
        number = {name: index for index, name in enumerate(self.labels or [])}
        features = []
        for feature, row, words in self._windows(rows, tokenizer):
            labels = [IGNORE_INDEX if word is None else number[rows[row]["tags"][word]] for word in words]
            features.append(feature | {"labels": labels})
        return features

    def predict(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], inference: Inference
    ) -> list[Any]:
        """Return a tag for each word; a word that two windows hold takes its tag from the one that shows more around.

        A word without a token of its own, such as an unprintable character, is outside of all entities.
        """
        windows = self._windows(rows, tokenizer)
        guesses = inference.map(
            [feature for feature, _, _ in windows],
            lambda features: self.collate(features, tokenizer),
            lambda batch: model(**batch).logits.argmax(-1).tolist(),
        )
        labels = self.labels or []
        tags: list[list[str]] = [[_OUTSIDE] * len(row["tokens"]) for row in rows]
        best: dict[tuple[int, int], int] = {}
        for (_, row, words), guess in zip(windows, guesses, strict=True):
            for place, word in enumerate(words):
                context = min(place, len(words) - 1 - place)
                if word is not None and context > best.get((row, word), -1):
                    best[row, word] = context
                    tags[row][word] = labels[guess[place]]
        return tags

    def score(self, rows: Sequence[Row], predictions: Sequence[Any]) -> Scores:
        """Return F1, precision and recall over whole entities, and the F1 of each class."""
        return entity_scores([row["tags"] for row in rows], predictions)

    def baselines(self, train: Sequence[Row], rows: Sequence[Row]) -> dict[str, list[Any]]:
        """Return for each word the tag that it has most often in training, O for a new word."""
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for row in train:
            for word, tag in zip(row["tokens"], row["tags"], strict=True):
                counts[word][tag] += 1
        usual = {word: count.most_common(1)[0][0] for word, count in counts.items()}
        return {"most frequent tag of the word": [[usual.get(w, _OUTSIDE) for w in row["tokens"]] for row in rows]}

    def _windows(
        self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase
    ) -> list[tuple[Feature, int, list[int | None]]]:
        """Return the windows with their row and, for each token that begins a word, that word's index.

        Words are joined by spaces, as the model has seen text: encoded one by one, they would lack the space in front.
        """
        texts, owners = [], []
        for row in rows:
            text, owner = self.options.prefix, [-1] * len(self.options.prefix)
            for index, word in enumerate(row["tokens"]):
                separator = " " if index else ""
                text += separator + word
                owner += [-1] * len(separator) + [index] * len(word)
            texts.append(text)
            owners.append(owner)
        encoded = tokenizer(
            texts,
            truncation=True,
            max_length=self.options.max_length,
            stride=self.options.stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        windows = []
        for place, feature in enumerate(unbatched(encoded)):
            row = encoded["overflow_to_sample_mapping"][place]
            sequence = encoded.sequence_ids(place)
            offsets = encoded["offset_mapping"][place]
            words = _first_tokens(offsets, sequence, texts[row], owners[row])
            windows.append((feature, row, words))
        return windows


def _first_tokens(
    offsets: Sequence[tuple[int, int]], sequence: Sequence[int | None], text: str, owner: Sequence[int]
) -> list[int | None]:
    words: list[int | None] = []
    seen = set()
    for (start, end), part in zip(offsets, sequence, strict=True):
        while start < end and text[start].isspace():  # some tokenizers count the space in front
            start += 1
        word = owner[start] if part is not None and start < end else -1
        begins = word >= 0 and (start == 0 or owner[start - 1] != word)
        # The bytes of one letter may be several tokens with equal offsets.
        words.append(word if begins and word not in seen else None)
        seen.add(word)
    return words


def _check_pairs(rows: Sequence[Row]) -> None:
    for index, row in enumerate(rows):
        if len(row["tokens"]) != len(row["tags"]):
            raise DataError(
                f"row {index:,} has {len(row['tokens'])} words and {len(row['tags'])} tags: {row['tokens'][:5]} ..."
            )
