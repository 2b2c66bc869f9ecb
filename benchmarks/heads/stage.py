"""Makes the subjects: one implementation at one workload, inference and a step of training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.attention.gate import poisoned_memory
from benchmarks.attention.workload import DTYPES
from benchmarks.heads import gate
from benchmarks.heads.models import PLAIN, YARDSTICK, Implementation, in_float64, plain
from benchmarks.heads.workload import Texts, Workload
from benchmarks.subject import Phase, Prepared, Subject

_MIB = 2**20


class Stage:
    """One workload on one device; its texts and the gate's answers are made once, at the first use."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self._workload, self._device = workload, device
        self._dtype = DTYPES[workload.dtype]

    @functools.cached_property
    def _texts(self) -> Texts:
        return Texts.draw(self._workload, self._device)

    @functools.cached_property
    def _answers(self) -> tuple[gate.Answer, gate.Answer]:
        """The encoder's classifier in float64, and in plain PyTorch in the type that is measured."""
        model, inputs = plain(self._workload).to(self._device, self._dtype), self._texts.padded_inputs(gate.ROWS)
        return gate.answer(in_float64(model), inputs), gate.answer(model, inputs)

    def subject(self, implementation: Implementation) -> Subject:
        """Return one implementation at this workload."""
        return Subject(
            implementation=implementation.name,
            parameters={"table": "padded" if self._workload.padded else "full", **self._workload.columns},
            prepare=lambda: self._prepare(implementation),
            yardstick=YARDSTICK,
        )

    def _prepare(self, implementation: Implementation) -> Prepared:
        model = implementation.build(self._workload).to(self._device, self._dtype)
        inputs = implementation.inputs(self._texts)
        run = torch.compile(model) if implementation.compiled else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=self._device.type == "cuda")

        def check() -> float:
            with poisoned_memory(self._device, python_too=False):
                got = gate.answer(model, implementation.inputs(self._texts, gate.ROWS))
            if implementation.name.startswith(YARDSTICK) and implementation.name != PLAIN:
                # A model of its own, with a decoder.
                truth = gate.answer(in_float64(model), self._texts.padded_inputs(gate.ROWS))
                share = gate.check(got, truth, None)
            else:
                truth, simple = self._answers
                share = gate.check(got, truth, None if implementation.name == PLAIN else simple)
            if implementation.compiled:
                self._check_compiled(model, run, inputs)
            return share

        def train() -> None:
            optimizer.zero_grad(set_to_none=True)
            run(**inputs).loss.backward()
            optimizer.step()

        def inference() -> Callable[[], object]:
            model.eval()
            return lambda: _without_grad(run, inputs)

        def training() -> Callable[[], object]:
            model.train()
            train()  # makes the optimiser's state
            return train

        amounts = {"texts": self._workload.batch, "tokens": sum(self._workload.lengths)}
        return Prepared(
            check=check,
            phases=(Phase("inference", inference, amounts=amounts), Phase("training", training, amounts=amounts)),
            peak=train,
            held_mib=3 * sum(p.numel() * p.element_size() for p in model.parameters()) / _MIB,  # and two moments
            figures=lambda: {"parameters": sum(p.numel() for p in model.parameters())},
        )

    def _check_compiled(self, model: nn.Module, run: Any, inputs: dict[str, Any]) -> None:
        """Raise unless the compiled model gives the logits of the eager one, up to rounding."""
        model.eval()
        expected, got = (_without_grad(function, inputs).logits.float() for function in (model, run))
        error = float((got - expected).norm() / expected.norm())
        if not error <= (1e-4 if self._dtype == torch.float32 else 0.1):
            raise gate.GateError(f"compiled logits are off by {error:.2e} of their norm")


@torch.no_grad()
def _without_grad(run: Any, inputs: dict[str, Any]) -> Any:
    return run(**inputs)
