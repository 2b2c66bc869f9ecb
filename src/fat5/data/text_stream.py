"""Endless streams of documents out of weighted text sources, shared out among readers and resumable exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fat5.data.counter_random import draw, draw_unit, permute
from fat5.data.sources import TextSource, local_files, open_dataset
from fat5.data.text_files import checked_text, missing_column, read_file
from fat5.errors import ConfigError, DataError

_DATASET_ROWS = 256
# Branches of the tree of random numbers that the windows of documents do not use.
_READERS, _FILES, _SOURCES, _BLOCKS = (2**61 + branch for branch in range(4))


@dataclass(frozen=True)
class StreamSource(TextSource):
    """One source of a stream.

    Attributes:
        source: Files, folders or quoted globs of .txt, .jsonl and .parquet files (.txt and .jsonl also .gz or .zst);
            or a folder written by `datasets` (`save_to_disk`); or the name of one data set of the hub; or
            `fat5:sample`, the French corpus shipped with the package.
        documents: What a document of a .txt file is: lines up to the next blank line (`paragraph`), each line (`line`)
            or the whole file (`file`). In all other formats a row is a document.
        text_column: Column that holds the text, in all formats but .txt.
        name: Configuration of the hub data set, where it has several.
        split: Split of the hub data set or of the `datasets` folder; `train` if not given.
        max_bytes: Must stay null: a stream reads its sources whole, again and again.
        weight: Share of the documents that come from this source; weights need not sum to 1.
    """

    weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.weight < float("inf"):
            raise ConfigError(
                f"weight of {self.source[0]} must be positive, got {self.weight}; drop the source instead"
            )
        if self.max_bytes is not None:
            raise ConfigError(f"max_bytes of {self.source[0]} must be null in a stream, got {self.max_bytes!r}")


@dataclass(frozen=True)
class StreamConfig:
    """Text that is read, shuffled and tokenised while training goes on.

    Attributes:
        sources: The sources, each with its weight; a source that is used up starts again.
        shuffle_buffer: Documents that each reader holds and gives out in random order before it reads the next ones; 1
            keeps their order.
    """

    sources: list[StreamSource]
    shuffle_buffer: int = 10_000

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("a stream needs at least one source, got an empty list")
        if self.shuffle_buffer < 1:
            raise ConfigError(f"shuffle_buffer must be 1 or more, got {self.shuffle_buffer}")

    def describe(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        return asdict(self)


class _Reader(Protocol):
    """Yields a reader's share of one source without end."""

    def __next__(self) -> str: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class DocumentStream:
    """The documents of reader number `reader` of `num_readers`; all of them together read every document once an epoch.

    The source of each document is drawn by weight. Blocks of `shuffle_buffer` documents are given out in random order.
    Every draw is a function of the seed, the reader and a count, so that a position is a few numbers.

    Args:
        config: The sources.
        seed: Seed of the order of files, the choice of sources and the shuffling.
        reader: This reader.
        num_readers: Readers over all ranks.
    """

    def __init__(self, config: StreamConfig, *, seed: int, reader: int = 0, num_readers: int = 1) -> None:
        self._size = config.shuffle_buffer
        self._key = reader_key(seed, reader)
        self._cumulative = list(accumulate(source.weight for source in config.sources))
        self._readers = [_open(source, seed, reader, num_readers) for source in config.sources]
        self._taken = 0
        self._block: list[str] = []
        self._given = 0
        self._block_start = self._position()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._given == len(self._block):
            self._block_start = self._position()
            self._block = [self._read() for _ in range(self._size)]
            self._given = 0
        key = _branch(_branch(self._key, _BLOCKS), self._block_start["taken"])
        text = self._block[permute(self._given, self._size, key)]
        self._given += 1
        return text

    def state_dict(self) -> dict[str, Any]:
        """Return the position: where the current block begins in each source, and how much of it was given out."""
        return {"block_start": self._block_start, "given": self._given, "begun": bool(self._block)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position; the current block is read again."""
        start = state["block_start"]
        self._taken = start["taken"]
        for reader, reader_state in zip(self._readers, start["sources"], strict=True):
            reader.load_state_dict(reader_state)
        self._block_start = start
        self._block = [self._read() for _ in range(self._size)] if state["begun"] else []
        self._given = state["given"]

    def _position(self) -> dict[str, Any]:
        return {"taken": self._taken, "sources": [reader.state_dict() for reader in self._readers]}

    def _read(self) -> str:
        share = draw_unit(_branch(self._key, _SOURCES), self._taken) * self._cumulative[-1]
        self._taken += 1
        # The last one, should rounding lift the share to the sum of the weights.
        chosen = next((i for i, reached in enumerate(self._cumulative) if share < reached), len(self._readers) - 1)
        return next(self._readers[chosen])


def reader_key(seed: int, reader: int) -> np.uint64:
    """Return the key of a reader's random numbers."""
    return _branch(_branch(np.uint64(seed), _READERS), reader)


def _branch(key: np.uint64, number: int) -> np.uint64:
    # Compiled functions give a Python int back, which they would not take again.
    return np.uint64(draw(key, number))


def _open(source: StreamSource, seed: int, reader: int, num_readers: int) -> _Reader:
    files = local_files(source)
    if files is not None:
        return _FileReader(source, files, seed, reader, num_readers)
    return _DatasetReader(source, lambda: _share(source, reader, num_readers), num_readers)


class _FileReader:
    """Local files, in a new order each epoch: whole files if there is one for each reader, else every n-th document."""

    def __init__(self, source: StreamSource, files: Sequence[Path], seed: int, reader: int, num_readers: int) -> None:
        self._source, self._files, self._reader, self._num_readers = source, files, reader, num_readers
        self._key = _branch(np.uint64(seed), _FILES)
        self._by_file = len(files) >= num_readers
        self._epoch = self._place = self._row = 0
        self._documents = self._read()

    def __next__(self) -> str:
        return next(self._documents)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "place": self._place, "row": self._row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._place, self._row = state["epoch"], state["place"], state["row"]
        self._documents = self._read()

    def _read(self) -> Iterator[str]:
        source = self._source
        while True:
            read_from_start, found = (self._place, self._row) == (0, 0), False
            order = self._order()
            while self._place < len(order):
                file = order[self._place]
                texts = read_file(self._files[file], documents=source.documents, text_column=source.text_column)
                for text in islice(texts, self._row, None):
                    # Whose a document is never changes, so that readers in different epochs share none.
                    mine = self._by_file or (file + self._row) % self._num_readers == self._reader
                    self._row += 1
                    if mine:
                        found = True
                        yield text
                self._place += 1
                self._row = 0
            if read_from_start and not found:
                raise DataError(_too_few(source, self._num_readers))
            self._epoch += 1
            self._place = self._row = 0

    def _order(self) -> list[int]:
        own = range(self._reader, len(self._files), self._num_readers) if self._by_file else range(len(self._files))
        key = _branch(self._key, self._epoch)
        return [own[permute(place, len(own), key)] for place in range(len(own))]


class _DatasetReader:
    """A data set of `datasets`; a position is its own `state_dict` and a row of the batch that follows."""

    def __init__(self, source: StreamSource, load: Callable[[], Any], num_readers: int) -> None:
        self._source, self._load, self._num_readers = source, load, num_readers
        self._dataset: Any = None
        self._epoch = self._row = 0
        self._start: dict[str, Any] | None = None
        self._documents = self._read()

    def __next__(self) -> str:
        return next(self._documents)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "row": self._row, "data_set": self._start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._row, self._start = state["epoch"], state["row"], state["data_set"]
        self._documents = self._read()

    def _read(self) -> Iterator[str]:
        column, label = self._source.text_column, self._source.source[0]
        while True:
            dataset = self._load()
            first = dataset.state_dict()
            from_start, found = self._start is None and self._row == 0, False
            if self._start is not None:
                dataset.load_state_dict(self._start)
            batches = dataset.iter(batch_size=_DATASET_ROWS)
            while (batch := _next_batch(batches, label)) is not None:
                if column not in batch:
                    raise DataError(f"{label}: {missing_column(column, list(batch))}")
                while self._row < len(batch[column]):
                    value = batch[column][self._row]
                    self._row += 1
                    found = True
                    yield checked_text(value, f"{label}, a row of epoch {self._epoch}", column)
                self._start, self._row = dataset.state_dict(), 0
            if from_start and not found:
                raise DataError(_too_few(self._source, self._num_readers))
            self._epoch += 1
            self._start, self._row = first, 0


def _next_batch(batches: Iterator[dict[str, list[Any]]], label: str) -> dict[str, list[Any]] | None:
    try:
        return next(batches, None)
    except Exception as error:
        raise DataError(f"{label}: reading failed: {error}") from error


def _share(source: StreamSource, reader: int, num_readers: int) -> Any:
    """Return a reader's share of a data set: its own shards if there are enough, else every n-th row."""
    import datasets
    from datasets.distributed import split_dataset_by_node

    dataset = open_dataset(source)
    if isinstance(dataset, datasets.Dataset):
        if source.text_column not in dataset.column_names:
            raise DataError(f"{source.source[0]}: {missing_column(source.text_column, dataset.column_names)}")
        dataset = dataset.to_iterable_dataset()
    if source.text_column in (dataset.column_names or ()):
        # Only the text is decoded: other columns may hold images.
        dataset = dataset.select_columns([source.text_column])
    if num_readers == 1:
        return dataset
    if dataset.num_shards >= num_readers:
        return dataset.shard(num_shards=num_readers, index=reader)
    return split_dataset_by_node(dataset, rank=reader, world_size=num_readers)


def _too_few(source: StreamSource, num_readers: int) -> str:
    return (
        f"{', '.join(source.source)} holds no document for one of {num_readers} readers (ranks x workers): use fewer "
        "workers, or pretokenise this source"
    )
