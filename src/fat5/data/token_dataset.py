"""Pretokenised documents as training reads them: memory-mapped, with all lengths known at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fat5.data.manifest import Manifest, Shard
from fat5.data.token_shards import map_shard
from fat5.data.tokenizer import tokenizer_fingerprint
from fat5.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest unsigned type that holds every id of a vocabulary: uint16 up to 65,536 ids, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


class TokenDataset:
    """The documents of one folder made by `fat5 pretokenize`, each a row of token ids without special tokens.

    Opening reads the manifest and the documents' offsets, never the tokens; these are mapped and paged in when used, so
    a corpus may be larger than memory, and worker processes share its pages.

    Args:
        path: The folder; with a validation split, its `train` or `validation` folder.

    Attributes:
        manifest: Counts, tokenizer and origin of the data.

    Raises:
        FileNotFoundError: There is no such folder.
        DataError: Its pretokenisation did not finish, its format is unknown, or a file is missing or damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        folder = Path(path).resolve()
        manifest = Manifest.read(folder)
        self._open(folder, manifest, [map_shard(folder, shard, manifest.dtype) for shard in manifest.shards])

    @staticmethod
    def from_lists(documents: Sequence[Sequence[int]], *, vocab_size: int) -> TokenDataset:
        """Make a data set in memory. It belongs to no tokenizer: any with at least `vocab_size` ids passes the check.

        Raises:
            DataError: An id is negative or not below `vocab_size`.
        """
        wide = [np.asarray(document, dtype=np.int64).reshape(-1) for document in documents]
        flat = np.concatenate([np.empty(0, dtype=np.int64), *wide])
        if flat.size and not 0 <= flat.min() <= flat.max() < vocab_size:
            raise DataError(f"token ids must be in 0..{vocab_size - 1}, got {flat.min()}..{flat.max()}")
        offsets = np.cumsum([0, *(document.size for document in wide)]).astype(np.int32)
        dtype = token_dtype(vocab_size)
        manifest = Manifest(
            dtype=dtype.name,
            vocab_size=vocab_size,
            shards=(Shard("", len(wide), flat.size),),
            documents=len(wide),
            tokens=flat.size,
            text_bytes=0,
        )
        return _in_memory(manifest, [(flat.astype(dtype), offsets)])

    def _open(self, folder: Path | None, manifest: Manifest, shards: list[tuple[np.ndarray, np.ndarray]]) -> None:
        self.manifest = manifest
        self._folder = folder
        self._shards = shards
        self._first_rows = np.cumsum([0, *(offsets.size - 1 for _, offsets in shards)])
        self._lengths: np.ndarray | None = None

    def __len__(self) -> int:
        return int(self._first_rows[-1])

    def __repr__(self) -> str:
        place = self._folder or "in memory"
        return f"TokenDataset({place}: {len(self):,} documents, {self.manifest.tokens:,} tokens)"

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each document, int64 [documents]; computed once from the offsets."""
        if self._lengths is None:
            parts = [np.diff(offsets).astype(np.int64) for _, offsets in self._shards]
            self._lengths = np.concatenate([np.empty(0, dtype=np.int64), *parts])
            self._lengths.flags.writeable = False
        return self._lengths

    def tokens(self, index: int) -> np.ndarray:
        """Return the token ids of one document: a read-only view of the mapped file, uint16 or uint32 [length].

        Raises:
            IndexError: `index` is not in 0..len - 1.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of a data set of {len(self)} documents")
        shard = int(np.searchsorted(self._first_rows, index, side="right")) - 1
        flat, offsets = self._shards[shard]
        row = index - int(self._first_rows[shard])
        return flat[offsets[row] : offsets[row + 1]]

    def flat_shards(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return, for each file, all its token ids end to end and its documents' offsets into them.

        Document i of a file is `flat[offsets[i]:offsets[i + 1]]`; files follow each other in document order. Both are
        views without a copy: uint16 or uint32 [tokens], and int32 [documents + 1].
        """
        return list(self._shards)

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Make sure that the data was made with `tokenizer`.

        Raises:
            DataError: Its fingerprint is another, or, for data made in memory, it has fewer ids than the data.
        """
        expected = self.manifest.tokenizer_fingerprint
        place = str(self._folder or "the data in memory")
        if expected is None:
            if len(tokenizer) < self.manifest.vocab_size:
                raise DataError(f"{place} has {self.manifest.vocab_size} ids, the tokenizer {len(tokenizer)}")
            return
        found = tokenizer_fingerprint(tokenizer)
        if found != expected:
            raise DataError(
                f"{place} was made with another tokenizer: {self.manifest.tokenizer_name!r} "
                f"({self.manifest.vocab_size} ids, {expected[:12]}), got {tokenizer.name_or_path!r} "
                f"({len(tokenizer)} ids, {found[:12]}); use that tokenizer, or run `fat5 pretokenize` with this one"
            )

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        # A mapped file travels to a worker process as its path, not as its content.
        if self._folder is None:
            return _in_memory, (self.manifest, self._shards)
        return TokenDataset, (self._folder,)


def _in_memory(manifest: Manifest, shards: list[tuple[np.ndarray, np.ndarray]]) -> TokenDataset:
    dataset = TokenDataset.__new__(TokenDataset)
    for array in chain.from_iterable(shards):
        array.flags.writeable = False
    dataset._open(None, manifest, shards)
    return dataset
