"""Text to token files: documents whole, in their order, encoded by one or several processes."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from fat5.data.manifest import MANIFEST_NAME, Manifest, Shard
from fat5.data.output_folder import output_folder, resumable_folder
from fat5.data.pretokenize_progress import (
    PROGRESS_NAME,
    Batch,
    Progress,
    SourceReader,
    SplitProgress,
    clear_unfinished,
    progress_key,
)
from fat5.data.sources import TextSource, expected_bytes, read_documents
from fat5.data.special_tokens import SpecialTokens
from fat5.data.text_encoder import EncodedDocuments, EncoderSettings, TextEncoder, encode_in_worker, start_worker
from fat5.data.text_files import checked_text, file_format
from fat5.data.token_dataset import token_dtype
from fat5.data.token_shards import write_shard
from fat5.data.tokenizer import backend_of, tokenizer_fingerprint, write_tokenizer
from fat5.errors import ConfigError, DataError
from fat5.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TRAIN, VALIDATION = "train", "validation"
TOKENIZER_FOLDER = "tokenizer"
_BATCH_BYTES = 1 << 20
_BATCH_DOCUMENTS = 1 << 13
_BATCHES_IN_FLIGHT = 4  # for each process, so that none waits for the reader
_REPLACEABLE = (MANIFEST_NAME, "tokens-*.arrow", TRAIN, VALIDATION, TOKENIZER_FOLDER)


@dataclass(frozen=True)
class PretokenizeConfig:
    """Settings of pretokenisation. The output is the same for any number of processes.

    Attributes:
        num_proc: Number of processes that encode; 1 encodes in this process, with threads on all cores.
        min_tokens: Documents with fewer tokens are skipped, and counted.
        validation_fraction: Share of documents kept apart for validation, chosen by a hash of their text, so that
            equal texts stay together and a second run chooses the same. With 0 the folder holds the token files;
            otherwise its folders `train` and `validation` do.
        shard_tokens: About how many tokens a token file holds; two files' worth must fit into memory.
        overwrite: Whether to replace an earlier output. Only a folder made by this command is ever replaced.
    """

    num_proc: int = 1
    min_tokens: int = 1
    validation_fraction: float = 0.0
    shard_tokens: int = 2**25
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name in ("num_proc", "min_tokens", "shard_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0.0 <= self.validation_fraction < 1.0:
            raise ConfigError(f"validation_fraction must be in [0, 1), got {self.validation_fraction}")


def pretokenize(
    source: TextSource | Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    output: str | os.PathLike[str],
    config: PretokenizeConfig | None = None,
    *,
    show_progress: bool = True,
) -> dict[str, Manifest]:
    """Encode every document of `source` into token files in the folder `output`.

    Documents stay whole and in order, and get no special tokens: text that spells one (`</s>`) stays text. The folder
    appears when all is written, with the manifest of each split and a copy of the tokenizer; after an error or a kill
    there is none. After a kill or Ctrl+C the token files written so far stay in a hidden folder beside it, and the same
    call goes on from there, to the same bytes; it reads the earlier text again to make sure that it is the same. Only
    documents given as an iterable start anew.

    Args:
        source: Where the text comes from, or the documents themselves.
        tokenizer: A fast tokenizer with sentinels.
        output: The folder to make, for `TokenDataset`.
        config: Settings; the defaults if None.
        show_progress: Whether to show a progress bar.

    Returns:
        The manifest of each split: "train", and "validation" where some documents were kept apart.

    Raises:
        DataError: The tokenizer has no sentinels, the source is damaged, no document is left, or a process died.
        FileExistsError: `output` is not empty and may not be replaced.
        OSError: The output cannot be written; nothing of it is kept.
    """
    config = config or PretokenizeConfig()
    SpecialTokens.from_tokenizer(tokenizer, prefixes=())
    # What is missing shows before the output is begun.
    texts = _open(source)
    # One more than the highest id: some vocabularies have holes.
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    dtype = token_dtype(vocab_size)
    encoder = EncoderSettings(
        tokenizer_json=backend_of(tokenizer).to_str(),
        dtype=dtype.name,
        min_tokens=config.min_tokens,
        validation_fraction=config.validation_fraction,
    )
    settings = {key: value for key, value in asdict(config).items() if key not in ("num_proc", "overwrite")}
    common = {
        "dtype": dtype.name,
        "vocab_size": vocab_size,
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer),
        "tokenizer_name": str(tokenizer.name_or_path),
        "source": source.describe() if isinstance(source, TextSource) else {},
        "settings": settings,
        "fat5_version": __version__,
    }
    names = (TRAIN, VALIDATION) if config.validation_fraction > 0 else (TRAIN,)
    # Documents that come from a program cannot be asked for again.
    make_folder = resumable_folder if isinstance(source, TextSource) else output_folder
    with (
        make_folder(output, overwrite=config.overwrite, replaceable=_REPLACEABLE) as folder,
        tqdm(
            total=expected_bytes(source) if isinstance(source, TextSource) else None,
            unit="B",
            unit_scale=True,
            desc="pretokenising",
            disable=not show_progress,
        ) as bar,
    ):
        splits = [_Split(folder / name if len(names) > 1 else folder) for name in names]
        key = progress_key(common)
        reader = _go_on(source, texts, folder, splits, key, dtype.name, bar)
        write_tokenizer(tokenizer, folder / TOKENIZER_FOLDER)
        pending = 0
        batches = reader.batches(most_bytes=_BATCH_BYTES, most_documents=_BATCH_DOCUMENTS)
        for batch, encoded in _encoded(batches, encoder, config.num_proc):
            bar.update(batch.size)
            for split, part in zip(splits, encoded, strict=True):
                pending += split.add(part)
            # All splits are written together, so that a row of files stands for one stretch of the source.
            if pending >= config.shard_tokens:
                pending = 0
                for split in splits:
                    split.flush()
                Progress(key, batch.documents, batch.digest, tuple(split.progress() for split in splits)).write(folder)
        bar.total = bar.n
        manifests = {
            name: split.finish(split_name=name if len(names) > 1 else None, **common)
            for name, split in zip(names, splits, strict=True)
        }
        _check_not_empty(manifests, config)
        (folder / PROGRESS_NAME).unlink(missing_ok=True)
        for name, split in zip(names, splits, strict=True):
            manifests[name].write(split.folder)
    return manifests


def _open(source: TextSource | Iterable[str]) -> Iterator[str]:
    return read_documents(source) if isinstance(source, TextSource) else _checked(source)


def _go_on(
    source: TextSource | Iterable[str],
    texts: Iterator[str],
    folder: Path,
    splits: list[_Split],
    key: str,
    dtype: str,
    bar: tqdm,
) -> SourceReader:
    """Take up what a killed run left in `folder`, if it fits, and return the source from where that ended."""
    folders = [split.folder for split in splits]
    progress = Progress.read(folder, key, folders, dtype)
    reader = SourceReader(texts)
    if progress is not None:
        logger.info("going on behind the %s documents of an interrupted run", f"{progress.documents:,}")
        size, digest = reader.skip(progress.documents)
        if digest == progress.digest:
            bar.update(size)
            for split, earlier in zip(splits, progress.splits, strict=True):
                split.go_on(earlier)
        else:
            logger.warning("the source has changed since the interrupted run: starting anew")
            progress, reader = None, SourceReader(_open(source))
    clear_unfinished(folder, folders, progress)
    return reader


class _Split:
    """The token files of one split, and what is waiting to be written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tokens: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []
        self._shards: list[Shard] = []
        self._text_bytes = 0
        self._skipped: Counter[str] = Counter()

    def add(self, part: EncodedDocuments) -> int:
        """Take the documents of one batch; return their number of tokens."""
        self._tokens.append(part.tokens)
        self._lengths.append(part.lengths)
        self._text_bytes += part.text_bytes
        self._skipped.update(part.skipped)
        return part.tokens.size

    def go_on(self, progress: SplitProgress) -> None:
        """Take over what an interrupted run has written."""
        self._shards = list(progress.shards)
        self._text_bytes = progress.text_bytes
        self._skipped = Counter(progress.skipped)

    def progress(self) -> SplitProgress:
        """Return what is written; nothing may be waiting."""
        return SplitProgress(tuple(self._shards), self._text_bytes, dict(self._skipped))

    def flush(self) -> None:
        """Write what is waiting as one file."""
        if any(lengths.size for lengths in self._lengths):
            path = self.folder / f"tokens-{len(self._shards):05d}.arrow"
            self._shards.append(write_shard(path, self._tokens, self._lengths))
        self._tokens, self._lengths = [], []

    def finish(self, *, split_name: str | None, **common: Any) -> Manifest:
        """Write the last file and return the manifest, which is not written yet."""
        self.flush()
        return Manifest(
            shards=tuple(self._shards),
            documents=sum(shard.documents for shard in self._shards),
            tokens=sum(shard.tokens for shard in self._shards),
            text_bytes=self._text_bytes,
            skipped=dict(sorted(self._skipped.items())),
            split=split_name,
            **common,
        )


def _check_not_empty(manifests: dict[str, Manifest], config: PretokenizeConfig) -> None:
    for name, manifest in manifests.items():
        if manifest.documents:
            continue
        counts: Counter[str] = Counter()
        for other in manifests.values():
            counts.update(other.skipped)
        kept = sum(other.documents for other in manifests.values())
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in counts.items()) or "none"
        split = f"for the {name} split " if len(manifests) > 1 else ""
        advice = f"; validation_fraction is {config.validation_fraction}" if kept else ""
        if kept and _by_paragraph(manifest.source):
            advice += "; in .txt files a blank line ends a document, unless documents is 'line'"
        raise DataError(f"no document is left {split}of {kept + counts.total():,} read; skipped: {left_out}{advice}")


def _by_paragraph(source: Mapping[str, Any]) -> bool:
    texts = [entry for entry in source.get("source", []) if file_format(Path(entry)) == ".txt"]
    return bool(texts) and source["documents"] == "paragraph"


def _checked(documents: Iterable[str]) -> Iterator[str]:
    if isinstance(documents, str):
        raise ConfigError(
            f"expected a TextSource or documents, got one text; for a file, pass TextSource([{documents!r}])"
        )
    return (checked_text(text, f"document {i:,}", "text") for i, text in enumerate(documents))


def _encoded(
    batches: Iterable[Batch], settings: EncoderSettings, num_proc: int
) -> Iterator[tuple[Batch, list[EncodedDocuments]]]:
    """Encode batches in order, with a bounded number of them under way; yield each with its encoded documents."""
    if num_proc == 1:
        encoder = TextEncoder(settings)
        for batch in batches:
            yield batch, encoder.encode(batch.texts)
        return
    # Spawned, not forked: the threads of the tokenizers library do not survive a fork.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_proc, mp_context=context, initializer=start_worker, initargs=(settings,))
    waiting: deque[tuple[Batch, Future[list[EncodedDocuments]]]] = deque()
    try:
        for batch in batches:
            waiting.append((batch, pool.submit(encode_in_worker, batch.texts)))
            if len(waiting) >= _BATCHES_IN_FLIGHT * num_proc:
                done, future = waiting.popleft()
                yield done, future.result()
        for done, future in waiting:
            yield done, future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a process that encodes ended abruptly, often since memory ran out: use fewer processes (num_proc); in a "
            "script, call pretokenize under `if __name__ == '__main__':`"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
