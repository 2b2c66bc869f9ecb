"""Whether text that a task is judged on occurs in a pretraining corpus, or in the task's own training split."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_LONG_LINE = 60
"""Characters from which a line counts on its own: headings and formulas recur in unrelated documents."""


@dataclass
class LeakReport:
    """What a search for leaks found.

    Attributes:
        documents: Held-out documents looked at.
        ids: Ids of held-out documents that the corpus, or another split, holds.
        texts: Beginnings of held-out texts that occur whole as a document or a line of the corpus.
        covered: Beginnings of held-out texts most of whose long lines the corpus holds.
        shared_lines: Share of all long held-out lines that the corpus holds: stock paragraphs, where there is no leak.
    """

    documents: int = 0
    ids: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    covered: list[str] = field(default_factory=list)
    shared_lines: float = 0.0

    @property
    def leaks(self) -> int:
        """Number of documents found."""
        return len(self.ids) + len(self.texts) + len(self.covered)

    def __str__(self) -> str:
        return (
            f"{self.documents} held-out documents: {len(self.ids)} known by id, {len(self.texts)} whole in the corpus, "
            f"{len(self.covered)} mostly in it; {self.shared_lines:.1%} of the long lines are shared"
        )


class CorpusIndex:
    """Hashes of the documents and of the lines of a corpus, and the ids of its documents.

    Texts are compared in one Unicode form (NFKC), in lower case, with single spaces and without punctuation, so that a
    copy with other quotes or line ends is found.
    """

    def __init__(self) -> None:
        self.texts: set[bytes] = set()
        self.ids: set[str] = set()

    def add(self, text: str, identifier: Any = None) -> None:
        """Add a document."""
        self.texts.add(_hash(text))
        for line in text.splitlines():
            if line.strip():
                self.texts.add(_hash(line))
        if identifier is not None:
            self.ids.add(str(identifier))

    def find(
        self, rows: Iterable[Mapping[str, Any]], columns: Sequence[str], *, min_length: int = 30, most: float = 0.8
    ) -> LeakReport:
        """Return which held-out rows the corpus holds.

        Args:
            rows: Held-out rows; the column `id` is compared with the corpus's ids.
            columns: Their columns of text; a list of words is joined.
            min_length: Texts of fewer characters are not looked up: short ones recur by chance.
            most: Share of a text's long lines, of at least two, from which it counts as covered.
        """
        report = LeakReport()
        shared = total = 0
        for row in rows:
            report.documents += 1
            if row.get("id") is not None and str(row["id"]) in self.ids:
                report.ids.append(str(row["id"]))
            for text in _texts(row, columns):
                if len(text) < min_length:
                    continue
                lines = [line for line in text.splitlines() if len(line) >= _LONG_LINE]
                known = sum(_hash(line) in self.texts for line in lines)
                shared, total = shared + known, total + len(lines)
                if _hash(text) in self.texts:
                    report.texts.append(text[:80])
                elif len(lines) > 1 and known > most * len(lines):
                    report.covered.append(text[:80])
        report.shared_lines = shared / total if total else 0.0
        return report


def index_corpus(documents: Iterable[str | Mapping[str, Any]], text_column: str = "text") -> CorpusIndex:
    """Return the index of a corpus of texts, or of rows with a column of text and perhaps an `id`."""
    index = CorpusIndex()
    for document in documents:
        if isinstance(document, str):
            index.add(document)
        else:
            index.add(document[text_column], document.get("id"))
    return index


def _texts(row: Mapping[str, Any], columns: Sequence[str]) -> Iterator[str]:
    for column in columns:
        value = row[column]
        yield value if isinstance(value, str) else " ".join(value)


def _hash(text: str) -> bytes:
    folded = unicodedata.normalize("NFKC", text).casefold()
    words = "".join(letter if letter.isalnum() else " " for letter in folded).split()
    return hashlib.blake2b(" ".join(words).encode("utf-8", "surrogatepass"), digest_size=12).digest()
