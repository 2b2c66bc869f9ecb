"""Where text comes from: local files, a data set of the hub, or the shipped sample, read one document at a time."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fat5.data.hub import load_hub_dataset, may_be_on_hub
from fat5.data.sample import SAMPLE_NAME, sample_path
from fat5.data.text_files import (
    DocumentUnit,
    checked_text,
    file_format,
    missing_column,
    read_file,
    text_bytes_estimate,
)
from fat5.errors import ConfigError, DataError, nearest, nearest_path

if TYPE_CHECKING:
    import datasets

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_HUB_BATCH = 256
_KNOWN_FILES = ".txt, .jsonl or .parquet (the first two also .gz or .zst)"


@dataclass(frozen=True)
class TextSource:
    """Which text to read, and what a document of it is.

    Attributes:
        source: Files, folders or quoted globs of .txt, .jsonl and .parquet files (.txt and .jsonl also .gz or .zst);
            or a folder written by `datasets` (`save_to_disk`); or the name of one data set of the hub; or
            `fat5:sample`, the French corpus shipped with the package. Folders are read in order of their file names.
        documents: What a document of a .txt file is: lines up to the next blank line (`paragraph`), each line (`line`)
            or the whole file (`file`). In all other formats a row is a document.
        text_column: Column that holds the text, in all formats but .txt.
        name: Configuration of the hub data set, where it has several.
        split: Split of the hub data set or of the `datasets` folder; `train` if not given.
        max_bytes: Read documents until they add up to this much text in UTF-8, then stop: a number of bytes or a text
            like `500MB` (10**6 bytes) or `2GiB` (2**30 bytes). Everything is read if not given. It takes the first
            documents as they come, so shuffle files that are sorted by topic.
    """

    source: list[str]
    documents: DocumentUnit = "paragraph"
    text_column: str = "text"
    name: str | None = None
    split: str | None = None
    max_bytes: int | str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.source, str) or not self.source:
            raise ConfigError(f"source must be a list of at least one file, folder or name, got {self.source!r}")
        units = ("paragraph", "line", "file")
        if self.documents not in units:
            raise ConfigError(
                f"documents must be one of {', '.join(units)}, got {self.documents!r}{nearest(self.documents, units)}"
            )
        if self.max_bytes is not None:
            parse_bytes(self.max_bytes)

    def describe(self) -> dict[str, Any]:
        """Return the settings as plain values, for a manifest."""
        return {
            "source": list(self.source),
            "documents": self.documents,
            "text_column": self.text_column,
            "name": self.name,
            "split": self.split,
            "max_bytes": self.max_bytes,
        }


def parse_bytes(size: int | str) -> int:
    """Return a number of bytes for `size`: an int, or a text such as `500MB` (10**6) or `1.5GiB` (2**30).

    Raises:
        ConfigError: It is neither, or not positive.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)", str(size).strip().lower())
    if match is None or match[2] not in _UNITS or (count := int(float(match[1]) * _UNITS[match[2]])) < 1:
        raise ConfigError(f"expected a size such as 500MB (10**6 bytes) or 2GiB (2**30 bytes), got {size!r}")
    return count


def read_documents(source: TextSource) -> Iterator[str]:
    """Yield the documents of `source` in order; a row whose text is null is "".

    What is missing is reported at the call, damage when the reading comes to it.

    Raises:
        FileNotFoundError: A file or folder does not exist.
        DataError: A file is damaged, not UTF-8, of an unknown kind or without the text column; there is no document;
            or the hub data set could not be loaded.
    """
    texts = _all_documents(source)
    return texts if source.max_bytes is None else _capped(texts, parse_bytes(source.max_bytes))


def expected_bytes(source: TextSource) -> int | None:
    """Return about how many bytes of text `read_documents` will yield, or None if only reading would tell."""
    cap = None if source.max_bytes is None else parse_bytes(source.max_bytes)
    files = local_files(source)
    sizes = [] if files is None else [text_bytes_estimate(path, source.text_column) for path in files]
    known = [size for size in sizes if size is not None]
    if files is None or len(known) < len(sizes):
        return cap
    return sum(known) if cap is None else min(cap, sum(known))


def _all_documents(source: TextSource) -> Iterator[str]:
    files = local_files(source)
    if files is None:
        return _read_dataset(open_dataset(source), source)
    given = "name" if source.name is not None else "split" if source.split is not None else None
    if given:
        raise ConfigError(f"{given} applies to data sets of the hub and `datasets` folders, not to {source.source[0]}")
    return (
        text for path in files for text in read_file(path, documents=source.documents, text_column=source.text_column)
    )


def _capped(texts: Iterator[str], limit: int) -> Iterator[str]:
    read = 0
    for text in texts:
        yield text
        read += len(text) if text.isascii() else len(text.encode())
        if read >= limit:
            return


def local_files(source: TextSource) -> list[Path] | None:
    """Return the files to read, or None if the source is a data set that `datasets` loads."""
    if len(source.source) == 1 and _is_dataset(source.source[0]):
        return None
    return [path for entry in source.source for path in _files_of(entry)]


def _is_dataset(entry: str) -> bool:
    path = Path(entry)
    return _is_saved_dataset(path) if path.exists() else may_be_on_hub(entry)


def _is_saved_dataset(path: Path) -> bool:
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _files_of(entry: str) -> list[Path]:
    path = Path(entry)
    if entry == SAMPLE_NAME:
        return [sample_path()]
    if path.is_dir():
        visible = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
        files = sorted(p for p in visible if p.is_file() and file_format(p))
        if not files:
            raise DataError(f"the folder {entry} holds no file of a known kind: expected {_KNOWN_FILES}")
        return files
    if path.exists():
        if file_format(path) is None:
            raise DataError(f"{entry} is of an unknown kind: expected {_KNOWN_FILES}")
        return [path]
    # Path.glob takes no absolute pattern.
    matches = [Path(match) for match in sorted(glob.glob(entry, recursive=True))]  # noqa: PTH207
    if matches:
        return [file for match in matches for file in _files_of(str(match))]
    if glob.has_magic(entry):
        raise FileNotFoundError(f"no file matches {entry}")
    raise FileNotFoundError(f"{entry} does not exist{nearest_path(path)}")


def open_dataset(source: TextSource) -> datasets.Dataset | datasets.IterableDataset:
    """Open a folder written by `datasets`, or stream a data set of the hub; without a network the cache has it or not.

    Raises:
        DataError: There is no such data set or split.
    """
    entry, split = source.source[0], source.split or "train"
    if Path(entry).exists():
        import datasets

        if source.name is not None:
            raise ConfigError(f"name applies to data sets of the hub, not to the folder {entry}")
        return _saved_split(datasets.load_from_disk(entry), entry, split, explicit=source.split is not None)
    return load_hub_dataset(entry, source.name, split=split, streaming=True)


def _saved_split(loaded: Any, entry: str, split: str, *, explicit: bool) -> datasets.Dataset:
    if not isinstance(loaded, dict):
        if explicit:
            raise ConfigError(f"the data set in {entry} has no splits, got split {split!r}")
        return loaded
    if split not in loaded:
        raise DataError(f"{entry} has no split {split!r}; splits: {', '.join(loaded)}{nearest(split, loaded)}")
    return loaded[split]


def _read_dataset(dataset: datasets.Dataset | datasets.IterableDataset, source: TextSource) -> Iterator[str]:
    column, label = source.text_column, source.source[0]
    # A streamed data set may not know its columns before its first row.
    columns = dataset.column_names or list(next(iter(islice(dataset, 1)), {}))
    if columns and column not in columns:
        raise DataError(f"{label}: {missing_column(column, columns)}")
    row = 0
    try:
        # Only the text is decoded: other columns may hold images.
        for batch in dataset.select_columns([column]).iter(batch_size=_HUB_BATCH):
            for value in batch[column]:
                yield checked_text(value, f"{label}, row {row:,}", column)
                row += 1
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{label}: reading failed after row {row:,}: {error}") from error
    if row == 0:
        raise DataError(f"{label} holds no document")
