"""The data set of noised batches that training and evaluation iterate over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from fat5.data.budgets import resolve_budgets
from fat5.data.collator import DenoisingCollator
from fat5.data.denoisers import Denoiser
from fat5.data.denoising_config import DenoisingConfig
from fat5.data.packing import BatchPlan, PackingStatistics, Planner
from fat5.data.spans import SpanTable
from fat5.data.special_tokens import SpecialTokens
from fat5.data.window_tokens import ConcatenatedWindows, StoredWindows, TokenSource, WindowTokens
from fat5.errors import ConfigError

_ALL = 2**62


class DenoisingDataset(IterableDataset[dict[str, Any]]):
    """Streams batches of noised windows; see `fat5.data.collator.DenoisingCollator` for what a batch holds.

    Use it with `DataLoader(dataset, batch_size=None, num_workers=N)`. Every worker of every rank runs the same cheap
    planner and writes only its own batches: of the plan's batches, rank r of R takes r, r + R, ..., and worker w of N
    takes every N-th of those. So the stream of a rank is the same for any number of workers, and R ranks together see
    the batches that one alone would see.

    To resume, pass the number of batches that each rank has consumed as `start_batch`: the planner is run up to there,
    at millions of documents a second, and the stream goes on exactly as it would have.

    Args:
        source: The documents, a `fat5.data.token_dataset.TokenDataset` or the like.
        special_tokens: Ids of the special tokens.
        config: Layout, sizes, mixture and seed.
        shuffle: A new pseudo-random order of documents each epoch (training); otherwise as stored (evaluation).
        epochs: Passes over the documents; None for no end. With 1 and no shuffling, every window comes exactly once, in
            an order that never changes, the last batch partly filled.
        rank: This process's number.
        world_size: Number of processes.
        start_batch: Batches of this rank to leave out at the start.

    Attributes:
        budgets: Sizes of a batch, those included that the configuration left to the data.

    Raises:
        ConfigError: A size or number does not fit; the message says which.
        DataError: There is no document of 2 tokens or more.
    """

    def __init__(
        self,
        source: TokenSource,
        special_tokens: SpecialTokens,
        config: DenoisingConfig,
        *,
        shuffle: bool = True,
        epochs: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        start_batch: int = 0,
    ) -> None:
        super().__init__()
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank must lie in [0, world_size), got rank {rank} of {world_size}")
        if epochs is not None and epochs < 1:
            raise ConfigError(f"epochs must be 1 or more, or None for no end, got {epochs}")
        if start_batch < 0:
            raise ConfigError(f"start_batch must be 0 or more, got {start_batch}")
        num_sentinels = len(special_tokens.sentinels)
        self.budgets = resolve_budgets(config, source.lengths, num_sentinels)
        self._table = SpanTable.build(
            config.mixture,
            max_input_length=config.max_input_length,
            max_target_length=config.max_target_length,
            num_sentinels=num_sentinels,
        )
        self._config = config
        self._source = source
        self._special_tokens = special_tokens
        self._shuffle = shuffle
        self._epochs = epochs
        self._rank = rank
        self._world_size = world_size
        self._start_batch = start_batch
        self._observer: Planner | None = None
        # What does not fit together fails here, rather than at the first batch in a worker.
        self._planner()
        self.collator()

    @property
    def denoisers(self) -> tuple[Denoiser, ...]:
        """The mixture; a batch's `denoiser_ids` are indices into it."""
        return self._table.denoisers

    @property
    def batch_bytes(self) -> int:
        """Most bytes that the tensors of a batch take."""
        budgets = self.budgets
        inputs = 1 if self._config.layout == "packed" else 2
        # Ids, the attention mask and labels, what there is for each document, and room for alignment.
        return 8 * (inputs * budgets.encoder_budget + 2 * budgets.decoder_budget + 4 * budgets.max_documents) + 1024

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        collate = self.collator()
        for plan in self.plans(*((info.id, info.num_workers) if info else (0, 1))):
            yield collate(plan)

    def plans(self, worker: int = 0, num_workers: int = 1) -> Iterator[BatchPlan]:
        """Yield the plans of this rank from `start_batch` on, every `num_workers`-th of them from number `worker`."""
        planner = self._planner()
        planner.skip((self._start_batch + worker) * self._world_size + self._rank)
        while (plan := planner.next_batch()) is not None:
            yield plan
            planner.skip(num_workers * self._world_size - 1)

    def collator(self) -> DenoisingCollator:
        """Return what turns a plan into a batch."""
        windows: WindowTokens = StoredWindows(self._source)
        if self._config.layout == "concat":
            windows = ConcatenatedWindows(self._source, seed=self._config.seed, shuffle=self._shuffle)
        return DenoisingCollator(windows, self._special_tokens, self._table, self._config, self.budgets)

    def __len__(self) -> int:
        """Batches of this rank from `start_batch` on, found by planning them all.

        Raises:
            TypeError: The stream has no end.
        """
        if self._epochs is None:
            raise TypeError("a DenoisingDataset without a number of epochs has no length")
        planner = self._planner()
        planner.skip(_ALL)
        own_batches = -(-(planner.batches_planned - self._rank) // self._world_size)
        return max(own_batches - self._start_batch, 0)

    def statistics(self, num_batches: int | None = None) -> PackingStatistics:
        """Sum up the first `num_batches` batches of every rank, counted from the very start of the stream.

        The numbers come from the plan, so they are the same whoever asks and however many workers there are. Asking
        for ever more batches plans each only once.

        Args:
            num_batches: Batches of a rank, those before `start_batch` included; None for the whole of a finite stream.

        Raises:
            ConfigError: The stream has no end and `num_batches` is None.
        """
        if num_batches is None and self._epochs is None:
            raise ConfigError("statistics of a stream without end need a number of batches")
        wanted = _ALL if num_batches is None else num_batches * self._world_size
        if self._observer is None or self._observer.batches_planned > wanted:
            self._observer = self._planner()
        self._observer.skip(wanted - self._observer.batches_planned)
        return self._observer.statistics()

    def __getstate__(self) -> dict[str, Any]:
        # The observer's copy of the lengths need not travel to spawned workers.
        return {**self.__dict__, "_observer": None}

    def _planner(self) -> Planner:
        return Planner(
            self._source.lengths,
            self._table,
            self.budgets,
            seed=self._config.seed,
            shuffle=self._shuffle,
            epochs=self._epochs,
            concatenate=self._config.layout == "concat",
        )
