"""One table: its workload, its gate, and a subject for each implementation."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.pretraining.documents import packed_batches
from benchmarks.pretraining.models import Gate
from benchmarks.pretraining.steps import Implementation, Step, measure
from benchmarks.pretraining.workload import WORKLOADS, Workload
from benchmarks.subject import Prepared, Subject

DOCUMENTS = "documents"


class Stage:
    """Makes the subjects of one table; the gate's answer is computed once, at the first use.

    Args:
        table: A name in WORKLOADS, or "documents".
        device: Where; bf16 on a GPU, float32 on a CPU.
        steps: Steps of a round.
        rounds: Rounds.
        workers: Worker processes that feed real documents.
        documents: Documents to draw.
    """

    def __init__(
        self, table: str, device: torch.device, *, steps: int, rounds: int, workers: int, documents: int
    ) -> None:
        self._device = device
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._steps, self._rounds = steps, rounds
        self._workers, self._documents = workers, documents
        self._real = table == DOCUMENTS
        self._workload: Workload = replace(WORKLOADS["8x64"], table=table) if self._real else WORKLOADS[table]

    @functools.cached_property
    def _gate(self) -> Gate:
        return Gate(self._workload, self._device, self._dtype)

    def subject(self, implementation: Implementation) -> Subject:
        """Return one implementation at this table's workload."""
        unavailable = None
        if implementation.cuda_graphs and self._device.type != "cuda":
            unavailable = "CUDA graphs need a CUDA GPU"
        parameters = {**self._workload.columns, "dtype": str(self._dtype).removeprefix("torch.")}
        return Subject(implementation.name, parameters, lambda: self._prepare(implementation), unavailable)

    def _prepare(self, implementation: Implementation) -> Prepared:
        def check() -> float:
            # Eager and apart: the graph that is timed is specialised on the shapes that are timed.
            plain = Step(replace(implementation, mode=None), self._workload, self._device, self._dtype)
            return self._gate.check(plain.model, is_packed=implementation.fat5)

        def figures() -> dict[str, Any]:
            step = Step(implementation, self._workload, self._device, self._dtype)
            return measure(
                step,
                self._batches(step),
                self._workload,
                self._device,
                steps=self._steps,
                rounds=self._rounds,
            )

        return Prepared(check=check, figures=figures)

    def _batches(self, step: Step) -> Iterator[dict[str, Any]]:
        if self._real:
            return packed_batches(self._workload, self._device, workers=self._workers, documents=self._documents)
        return iter(step.synthetic(self._workload, self._device))
