"""The subjects of the case: one core, the planner, resuming, and worker processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import torch

from benchmarks.collator import gate
from benchmarks.collator.documents import RandomDocuments, special_tokens
from benchmarks.subject import Phase, Prepared, Subject
from fat5.data.budgets import resolve_budgets
from fat5.data.denoising_config import DenoisingConfig
from fat5.data.denoising_dataset import DenoisingDataset
from fat5.data.loader import BatchLoader, data_loader
from fat5.data.packing import Planner
from fat5.data.spans import SpanTable

IMPLEMENTATION = "fat5"
_BATCHES_A_REPETITION = 400
_PREFETCH_FACTOR = 4
_GATE_START_BATCH = 200


@dataclass(frozen=True)
class Pipeline:
    """The pipeline over random documents.

    Attributes:
        config: Layout, sizes and mixture.
        num_documents: Documents that batches are made of.
        num_resumed: Documents that come before a resumed run's first batch.
    """

    config: DenoisingConfig
    num_documents: int = 100_000
    num_resumed: int = 1_000_000

    def one_core(self) -> Subject:
        """Batches made in the process itself."""

        def prepare() -> Prepared:
            dataset = self._dataset(self.documents, epochs=1)
            planner = self._planner(self.documents)
            return Prepared(
                check=lambda: gate.check_text(dataset, planner, self.documents, self.config),
                phases=(self._stream_phase("collate", lambda: iter(self._dataset(self.documents))),),
                figures=lambda: self._fill(dataset),
            )

        return self._subject("one core", prepare, documents=self.num_documents)

    def planning(self) -> Subject:
        """The plan of an epoch, without its tokens: what each worker does for all the others' batches."""

        def prepare() -> Prepared:
            def whole_epoch() -> Planner:
                planner = self._planner(self.many_documents)
                planner.skip(2**62)
                return planner

            amounts = {"documents": float(self.num_resumed)}
            lengths = self.many_documents.lengths
            return Prepared(
                check=lambda: gate.check_every_token_planned(whole_epoch().statistics(), lengths),
                phases=(Phase("plan", lambda: whole_epoch, amounts=amounts, on_host=True),),
            )

        return self._subject("one core", prepare, documents=self.num_resumed)

    def resuming(self) -> Subject:
        """From nothing to the first batch behind `num_resumed` documents, in their second epoch."""

        def prepare() -> Prepared:
            start = len(self._dataset(self.many_documents, epochs=1))

            def resume() -> None:
                next(iter(self._dataset(self.many_documents, start_batch=start)))

            return Prepared(
                check=lambda: gate.check_resume(
                    self._dataset(self.documents),
                    self._dataset(self.documents, start_batch=_GATE_START_BATCH),
                    _GATE_START_BATCH,
                ),
                phases=(Phase("resume", lambda: resume, on_host=True),),
            )

        return self._subject("one core", prepare, documents=self.num_resumed)

    def loading(self, workers: int, pin_memory: bool) -> Subject:
        """Batches made by worker processes and taken by this one, pinned for a copy to the GPU or not."""

        def load() -> BatchLoader:
            return data_loader(self._dataset(self.documents), num_workers=workers, pin_memory=pin_memory)

        def start() -> Iterator[dict[str, Any]]:
            batches = iter(load())
            for _ in islice(batches, 2 * _PREFETCH_FACTOR * max(workers, 1)):
                pass
            return batches

        def prepare() -> Prepared:
            what = f"{workers} workers"
            return Prepared(
                check=lambda: gate.check_equal(load(), self._dataset(self.documents), what),
                phases=(self._stream_phase("load", start),),
            )

        unavailable = "pinned memory needs a CUDA GPU" if pin_memory and not torch.cuda.is_available() else None
        columns = {"documents": self.num_documents, "workers": workers, "pin_memory": pin_memory}
        return self._subject("workers", prepare, unavailable, **columns)

    @cached_property
    def documents(self) -> RandomDocuments:
        """What batches are made of."""
        return RandomDocuments(self.num_documents)

    @cached_property
    def many_documents(self) -> RandomDocuments:
        """What a resumed run has behind it."""
        return RandomDocuments(self.num_resumed)

    @cached_property
    def _tokens_a_batch(self) -> float:
        statistics = self._dataset(self.documents, epochs=1).statistics()
        return (statistics.input_tokens + statistics.target_tokens) / statistics.batches

    def _dataset(self, documents: RandomDocuments, **options: Any) -> DenoisingDataset:
        return DenoisingDataset(documents, special_tokens(), self.config, **options)

    def _planner(self, documents: RandomDocuments) -> Planner:
        num_sentinels = len(special_tokens().sentinels)
        table = SpanTable.build(
            self.config.mixture,
            max_input_length=self.config.max_input_length,
            max_target_length=self.config.max_target_length,
            num_sentinels=num_sentinels,
        )
        budgets = resolve_budgets(self.config, documents.lengths, num_sentinels)
        return Planner(documents.lengths, table, budgets, seed=self.config.seed, epochs=1)

    def _stream_phase(self, name: str, start: Any) -> Phase:
        def prepare() -> Any:
            batches = start()

            def take() -> None:
                for _ in islice(batches, _BATCHES_A_REPETITION):
                    pass

            return take

        amounts = {"batches": float(_BATCHES_A_REPETITION), "tokens": _BATCHES_A_REPETITION * self._tokens_a_batch}
        return Phase(name, prepare, amounts=amounts, on_host=True)

    def _fill(self, dataset: DenoisingDataset) -> dict[str, float]:
        statistics = dataset.statistics()
        return {
            "fill": statistics.fill,
            "encoder_fill": statistics.encoder_fill,
            "decoder_fill": statistics.decoder_fill,
        }

    def _subject(self, table: str, prepare: Any, unavailable: str | None = None, **columns: Any) -> Subject:
        parameters = {
            "table": table,
            "denoisers": self.config.denoisers,
            "max_input_length": self.config.max_input_length,
            "cores_allowed": len(os.sched_getaffinity(0)),
            **columns,
        }
        return Subject(IMPLEMENTATION, parameters, prepare, unavailable)


@contextlib.contextmanager
def cores(number: int | None) -> Iterator[None]:
    """Let this process and its children run on `number` cores alone; None changes nothing."""
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    if number is not None:
        os.sched_setaffinity(0, sorted(before)[:number])
        torch.set_num_threads(1)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)
