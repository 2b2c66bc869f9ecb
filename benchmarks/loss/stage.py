"""One workload with its inputs and its gate, before which the implementations come one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.gate import poisoned_memory
from benchmarks.loss.gate import Gate
from benchmarks.loss.implementations import Implementation, products
from benchmarks.loss.workload import Inputs, Workload
from benchmarks.subject import Phase, Prepared, Subject

PHASE = "forward+backward"
PRODUCTS = "products"
"""The three matrix products alone, the unit of the ratios of a loss from hidden states."""


class Stage:
    """Makes the subjects of one workload; inputs and the gate's float64 answer are made once, at the first use."""

    def __init__(self, workload: Workload, device: torch.device, copy_gb_per_s: float | None = None) -> None:
        self._workload, self._device, self._copy = workload, device, copy_gb_per_s

    @functools.cached_property
    def _inputs(self) -> Inputs:
        return Inputs.draw(self._workload, self._device)

    @functools.cached_property
    def _gate(self) -> Gate:
        return Gate(self._workload, self._inputs)

    def subject(self, implementation: Implementation, columns: Mapping[str, Any], yardstick: str) -> Subject:
        """Return one implementation at this workload.

        Args:
            implementation: What to run.
            columns: Columns before those of the workload.
            yardstick: Name of the implementation that is the unit of the ratios.
        """
        return Subject(
            implementation.name,
            {**columns, **self._workload.columns},
            lambda: self._prepare(implementation),
            implementation.unavailable(self._device),
            yardstick,
        )

    def products(self, columns: Mapping[str, Any]) -> Subject:
        """Return the three matrix products alone."""

        def prepare() -> Prepared:
            phase = Phase(PHASE, lambda: lambda: products(self._inputs.leaves), self._workload.flops)
            return Prepared(check=lambda: 0.0, phases=(phase,))

        return Subject(PRODUCTS, {**columns, **self._workload.columns}, prepare, None, PRODUCTS)

    def _prepare(self, implementation: Implementation) -> Prepared:
        loss = implementation.make(self._workload)
        labels = self._inputs.labels

        def fresh() -> tuple[Tensor, ...]:
            # Some implementations overwrite the logits.
            return tuple(leaf.clone().requires_grad_() for leaf in self._inputs.leaves)

        def both(leaves: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
            with implementation.around():
                result = loss(leaves, labels)
                return result, torch.autograd.grad(result, leaves)

        def check() -> float:
            leaves = fresh()
            with poisoned_memory(self._device, python_too=implementation.own):
                result, grads = both(leaves)
            return self._gate.check(result, grads)

        def timed() -> Callable[[], object]:
            leaves = fresh()
            return lambda: both(leaves)

        return Prepared(
            check=check,
            phases=(Phase(PHASE, timed, self._workload.flops, self._workload.moved_bytes),),
            peak=timed(),
            figures=lambda: {} if self._copy is None else {"copy_gb_per_s": self._copy},
        )
