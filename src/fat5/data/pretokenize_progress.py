"""How far a pretokenisation has come, kept beside its token files so that it can go on after a kill."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from fat5.data.manifest import Shard
from fat5.data.token_shards import map_shard
from fat5.errors import DataError
from fat5.files import atomic_file

PROGRESS_NAME = "progress.json"


class Batch(NamedTuple):
    """Documents to encode together.

    Attributes:
        texts: The documents.
        size: Bytes of their text in UTF-8.
        documents: Documents of the source up to and with these.
        digest: Hash of all their text.
    """

    texts: list[str]
    size: int
    documents: int
    digest: str


class SourceReader:
    """Reads a source once, in batches, counting and hashing what was read."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = iter(texts)
        self._hash = hashlib.blake2b(digest_size=16)
        self._documents = 0

    def skip(self, documents: int) -> tuple[int, str]:
        """Read documents without encoding them; return the bytes of their text and the hash of all text read."""
        size = sum(self._take(text) for text in islice(self._texts, documents))
        return size, self._hash.hexdigest()

    def batches(self, *, most_bytes: int, most_documents: int) -> Iterator[Batch]:
        """Group documents into batches of about `most_bytes`; a longer document ends its batch."""
        batch: list[str] = []
        size = 0
        for text in self._texts:
            batch.append(text)
            size += self._take(text)
            if size >= most_bytes or len(batch) >= most_documents:
                yield Batch(batch, size, self._documents, self._hash.copy().hexdigest())
                batch, size = [], 0
        if batch:
            yield Batch(batch, size, self._documents, self._hash.copy().hexdigest())

    def _take(self, text: str) -> int:
        raw = text.encode()
        self._hash.update(len(raw).to_bytes(8, "little"))
        self._hash.update(raw)
        self._documents += 1
        return len(raw)


@dataclass(frozen=True)
class SplitProgress:
    """What is written of one split: its whole token files, and what the manifest will say of them."""

    shards: tuple[Shard, ...]
    text_bytes: int
    skipped: dict[str, int]


@dataclass(frozen=True)
class Progress:
    """What is written of an output.

    Attributes:
        key: Hash of the source's settings, the tokenizer and the settings; another run has nothing to go on from.
        documents: Documents of the source that have been dealt with.
        digest: Hash of their text, by which a source that has changed is found.
        splits: What is written of each split.
    """

    key: str
    documents: int
    digest: str
    splits: tuple[SplitProgress, ...]

    def write(self, folder: Path) -> None:
        """Write it into `folder`, whole or not at all."""
        with atomic_file(folder / PROGRESS_NAME) as path:
            path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path, key: str, split_folders: list[Path], dtype: str) -> Progress | None:
        """Return the progress of an earlier run with the same `key` whose token files are whole, else None."""
        try:
            content = json.loads((folder / PROGRESS_NAME).read_text(encoding="utf-8"))
            splits = tuple(
                SplitProgress(
                    tuple(Shard(**shard) for shard in split["shards"]), split["text_bytes"], dict(split["skipped"])
                )
                for split in content["splits"]
            )
            progress = cls(content["key"], content["documents"], content["digest"], splits)
            if progress.key != key:
                return None
            for split_folder, split in zip(split_folders, splits, strict=True):
                for shard in split.shards:
                    map_shard(split_folder, shard, dtype)
        except (OSError, ValueError, KeyError, TypeError, DataError):
            return None
        return progress


def progress_key(*parts: Any) -> str:
    """Return a hash of plain values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def clear_unfinished(folder: Path, split_folders: list[Path], progress: Progress | None) -> None:
    """Remove everything from `folder` but the token files that `progress` names."""
    kept: set[Path] = set()
    if progress is not None:
        for split_folder, split in zip(split_folders, progress.splits, strict=True):
            kept.update(split_folder / shard.file for shard in split.shards)
            kept.update({folder / PROGRESS_NAME, split_folder})
    for path in [*folder.iterdir(), *(p for f in split_folders if f != folder and f.is_dir() for p in f.iterdir())]:
        if path in kept:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
