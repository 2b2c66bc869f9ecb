"""The implementations, their correctness gate, and what is measured of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.generation.workload import DTYPES, Models, Workload, generated
from benchmarks.subject import GateError, Phase, Prepared, Subject

YARDSTICK = "transformers"
IMPLEMENTATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "transformers": ("transformers", {}),
    "transformers static": ("transformers", {"cache_implementation": "static"}),
    "fat5": ("fat5", {}),
    "fat5 static": ("fat5", {"cache_implementation": "static"}),
    "fat5 graph": ("fat5", {"cuda_graph": True}),
}
"""By name: whose model, and the arguments of `generate`. Static caches are compiled on a GPU, by Transformers."""

_GATE_ROWS, _GATE_TOKENS, _LEAST_KINDS = 2, 24, 4


class Generation:
    """Measures all implementations at one workload after the other.

    The gate asks for the same tokens as Transformers' in float32, on two rows of the timed length: in bfloat16 rounding
    decides between tokens that are nearly as likely. What share of the timed tokens equals Transformers' is a column.

    Args:
        size: Size of the model.
        device: Where to measure.
    """

    def __init__(self, size: str, device: torch.device) -> None:
        self._models = Models(size, device)
        self._device = device

    def subject(self, name: str, workload: Workload) -> Subject:
        """Return an implementation at a workload."""
        return Subject(
            implementation=name,
            parameters=workload.columns(),
            prepare=lambda: self._prepare(name, workload),
            yardstick=YARDSTICK,
        )

    def _prepare(self, name: str, workload: Workload) -> Prepared:
        library, options = IMPLEMENTATIONS[name]
        inputs = workload.inputs(self._device)
        dtype = DTYPES[workload.dtype]

        def run() -> Tensor:
            return generated(self._models.get(library, dtype), inputs, **options)

        def figures() -> Mapping[str, Any]:
            same = run() == self._reference(workload)
            return {"same_tokens": float(same[:, 1:].float().mean())}

        name_of_phase = "greedy" if workload.beams == 1 else f"{workload.beams} beams"
        tokens = workload.batch * workload.new_tokens
        phase = Phase(name_of_phase, lambda: run, amounts={"tokens": tokens}, on_host=True)
        return Prepared(check=lambda: self._check(name, workload), phases=(phase,), peak=run, figures=figures)

    def _check(self, name: str, workload: Workload) -> float:
        library, options = IMPLEMENTATIONS[name]
        small = dataclasses.replace(
            workload,
            batch=min(workload.batch, _GATE_ROWS),
            new_tokens=min(workload.new_tokens, _GATE_TOKENS),
            dtype="fp32",
        )
        if "cache_implementation" in options:  # the same code; to compile it for the gate alone would take a minute
            options = options | {"disable_compile": True}
        got = generated(self._models.get(library, torch.float32), small.inputs(self._device), **options)
        want = self._reference(small)
        if got.shape != want.shape or not torch.equal(got, want):
            raise GateError(
                f"in float32 it generates {got.tolist()[0][:12]}..., Transformers {want.tolist()[0][:12]}..."
            )
        if len(want[:, 1:].unique()) < min(_LEAST_KINDS, want.shape[1] - 1):
            raise GateError(f"the model repeats itself, which shows nothing: {want.tolist()[0][:12]}...")
        return 0.0

    @functools.cache  # noqa: B019  (it lives as long as the run)
    def _reference(self, workload: Workload) -> Tensor:
        model = self._models.get("transformers", DTYPES[workload.dtype])
        return generated(model, workload.inputs(self._device))
