"""Batches out of text that is read, shuffled and tokenised on the fly, for corpora that are too large to keep."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from fat5.data.budgets import resolve_budgets
from fat5.data.collator import DenoisingCollator
from fat5.data.denoisers import Denoiser
from fat5.data.denoising_config import DenoisingConfig
from fat5.data.packing import Budgets
from fat5.data.spans import SpanTable
from fat5.data.special_tokens import SpecialTokens
from fat5.data.stream_planner import Chunk, StreamPlanner
from fat5.data.text_encoder import EncoderSettings, TextEncoder
from fat5.data.text_stream import DocumentStream, StreamConfig, reader_key
from fat5.data.token_dataset import token_dtype
from fat5.data.tokenizer import backend_of, tokenizer_fingerprint
from fat5.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK_DOCUMENTS = 256
_SAMPLED_DOCUMENTS = 2_000


@dataclass(frozen=True)
class StreamStatistics:
    """What became of the documents read so far; `+` sums up readers.

    Attributes:
        documents: Documents read and not skipped, counted again in each epoch.
        text_tokens: Their tokens in the batches so far, before noising.
        skipped: Number of documents and tails left out, by reason.
        skipped_tokens: Tokens in them.
    """

    documents: int = 0
    text_tokens: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)
    skipped_tokens: int = 0

    def __add__(self, other: StreamStatistics) -> StreamStatistics:
        return StreamStatistics(
            self.documents + other.documents,
            self.text_tokens + other.text_tokens,
            dict(Counter(self.skipped) + Counter(other.skipped)),
            self.skipped_tokens + other.skipped_tokens,
        )


class StreamingDataset(IterableDataset[dict[str, Any]]):
    """Streams batches of noised windows out of text sources, without end; batches are those of `DenoisingDataset`.

    With W ranks of N workers there are C = W * max(N, 1) readers, and worker w of rank r is number r * N + w. Reader c
    has its own share of every source, its own shuffling and its own packing, and a rank takes a batch of each of its
    readers in turn. So the batches are a function of the seed, W and N, whatever the timing; all readers together see
    every document of a source once before any of them sees one again (a reader whose share is smaller starts its next
    epoch earlier).

    `fat5.data.loader.data_loader` makes a loader whose state can be saved and taken up exactly.

    Args:
        stream: The sources.
        tokenizer: A fast tokenizer with sentinels and the mixture's prefixes.
        config: Layout, sizes, mixture and seed. Sizes that are null come from the lengths of the first 2,000 documents.
            Rows of layout `concat` join the documents of a chunk of 256, and the last row of a chunk is shorter.
        rank: This process's number.
        world_size: Number of processes.

    Attributes:
        budgets: Sizes of a batch.
        special_tokens: The tokenizer's special ids.

    Raises:
        ConfigError: A size or number does not fit.
        DataError: A source is missing or damaged, or the tokenizer lacks a special token.
    """

    def __init__(
        self,
        stream: StreamConfig,
        tokenizer: PreTrainedTokenizerBase,
        config: DenoisingConfig,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__()
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank must lie in [0, world_size), got rank {rank} of {world_size}")
        prefixes = list(dict.fromkeys(denoiser.prefix for denoiser in config.mixture if denoiser.prefix is not None))
        self.special_tokens = SpecialTokens.from_tokenizer(tokenizer, prefixes)
        self.rank, self.world_size = rank, world_size
        self.stream, self.config = stream, config
        # Files that are missing show here, rather than at the first batch in a worker.
        DocumentStream(stream, seed=config.seed)
        self._encoder = EncoderSettings(
            tokenizer_json=backend_of(tokenizer).to_str(),
            dtype=token_dtype(max(tokenizer.get_vocab().values()) + 1).name,
            min_tokens=1,
            validation_fraction=0.0,
        )
        num_sentinels = len(self.special_tokens.sentinels)
        self.table = SpanTable.build(
            config.mixture,
            max_input_length=config.max_input_length,
            max_target_length=config.max_target_length,
            num_sentinels=num_sentinels,
        )
        self.budgets: Budgets = resolve_budgets(config, self._sampled_lengths(), num_sentinels)
        described = [stream.describe(), asdict(config), asdict(self.budgets), tokenizer_fingerprint(tokenizer)]
        self.fingerprint = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def denoisers(self) -> tuple[Denoiser, ...]:
        """The mixture; a batch's `denoiser_ids` are indices into it."""
        return self.table.denoisers

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        return self.reader(*((info.id, info.num_workers) if info else (0, 1)))

    def reader(self, worker: int, num_workers: int) -> StreamReader:
        """Return the reader of one worker of this rank."""
        return StreamReader(self, self.rank * num_workers + worker, self.world_size * num_workers)

    def encoder(self) -> TextEncoder:
        """Return what tokenises batches of documents, as pretokenisation does."""
        return TextEncoder(self._encoder)

    def _sampled_lengths(self) -> np.ndarray:
        if self.config.layout != "packed" or None not in (self.config.decoder_budget, self.config.max_documents):
            return np.array([2])
        sources = replace(self.stream, shuffle_buffer=1)
        texts = list(islice(DocumentStream(sources, seed=self.config.seed), _SAMPLED_DOCUMENTS))
        return self.encoder().encode(texts)[0].lengths


class StreamReader:
    """The batches of one worker: documents, tokenised in chunks, cut into windows, packed and noised.

    Args:
        dataset: What is read.
        reader: Number of this reader.
        num_readers: Readers over all ranks.
    """

    def __init__(self, dataset: StreamingDataset, reader: int, num_readers: int) -> None:
        config = dataset.config
        # Seeds of the engine are 63 bits wide.
        seed = int(reader_key(config.seed, reader)) >> 1
        self._documents = DocumentStream(dataset.stream, seed=config.seed, reader=reader, num_readers=num_readers)
        self._encoder = dataset.encoder()
        self._joined = config.layout == "concat"
        self._planner = StreamPlanner(dataset.table, dataset.budgets, seed=seed)
        self._collate = DenoisingCollator(
            self._planner, dataset.special_tokens, dataset.table, replace(config, seed=seed), dataset.budgets
        )
        self._skipped: Counter[str] = Counter()  # before they came to the planner, which counts its own

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        while self._planner.needs_chunk:
            self._planner.add_chunk(self._chunk())
        batch = self._collate(self._planner.next_batch())
        self._planner.drop_used_chunks()
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next batches hang on, a megabyte or so, as numbers, texts and arrays."""
        return {
            "documents": self._documents.state_dict(),
            "planner": self._planner.state_dict(),
            "skipped": dict(self._skipped),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a reader of the same number and settings was."""
        self._documents.load_state_dict(state["documents"])
        self._planner.load_state_dict(state["planner"])
        self._skipped = Counter(state["skipped"])

    def statistics(self) -> StreamStatistics:
        """Sum up the documents read so far."""
        planned = self._planner.statistics()
        return StreamStatistics(
            planned.documents,
            planned.text_tokens,
            dict(self._skipped + Counter(planned.skipped)),
            planned.skipped_tokens,
        )

    def _chunk(self) -> Chunk:
        (encoded,) = self._encoder.encode(list(islice(self._documents, _CHUNK_DOCUMENTS)))
        self._skipped.update(encoded.skipped)
        lengths = encoded.lengths
        if self._joined:
            lengths = lengths.sum(keepdims=True)
        return Chunk(encoded.tokens, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


def use_one_thread() -> None:
    """Keep the tokenizers library to this process's own core; called in worker processes, which are one a core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
