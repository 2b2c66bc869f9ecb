"""One workload with its inputs and its gate, before which the implementations come one after the other."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.gate import Gate, poisoned_memory
from benchmarks.attention.implementation import Implementation, Run
from benchmarks.attention.reference import Answer
from benchmarks.attention.workload import Inputs, Workload, real_tokens
from benchmarks.subject import Phase, Prepared, Subject

_MIB = 2**20


class Stage:
    """Makes the subjects of one workload; inputs and the gate's float64 answer are made once, at the first use."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self._workload, self._device = workload, device

    @functools.cached_property
    def _inputs(self) -> Inputs:
        return Inputs.draw(self._workload, self._device)

    @functools.cached_property
    def _gate(self) -> Gate:
        return Gate(self._workload, self._inputs)

    def subject(
        self, implementation: Implementation, columns: Mapping[str, Any], *, yardstick: str, timed: bool = True
    ) -> Subject:
        """Return one implementation at this workload.

        Args:
            implementation: What to run.
            columns: Columns before those of the workload.
            yardstick: Name of the implementation that is the unit of the ratios.
            timed: False to find the peak of memory alone.
        """
        return Subject(
            implementation=implementation.name,
            parameters={**columns, **self._workload.columns},
            prepare=lambda: self._prepare(implementation, timed),
            unavailable=implementation.unavailable(self._workload, self._device),
            yardstick=yardstick,
        )

    def _prepare(self, implementation: Implementation, timed: bool) -> Prepared:
        run = implementation.prepare(self._workload, self._inputs)

        def check() -> float:
            with poisoned_memory(self._device, python_too=implementation.own):
                out = run.forward()
                grads = gradients(run, out)
            answer = self._standard(run, out.detach(), grads)
            return self._gate.check(answer, with_bias=implementation.has_bias)

        def backward() -> Any:
            out = run.forward()
            return lambda: gradients(run, out, retain_graph=True)

        def figures() -> dict[str, Any]:
            own = {"bit_equal": bit_equal(run)} if implementation.own and timed else {}
            return {"bias_gradient": bias_gradient} | own

        bias_gradient = "no bias" if not implementation.has_bias else "no" if run.bias_gradient is None else "yes"
        phases = (
            Phase("forward", lambda: run.forward, self._workload.forward_flops),
            Phase("backward", backward, self._workload.backward_flops),
        )
        return Prepared(
            check=check,
            phases=phases if timed else (),
            peak=lambda: gradients(run, run.forward()),
            held_mib=sum(x.numel() * x.element_size() for x in run.held) / _MIB,
            figures=figures,
        )

    def _standard(self, run: Run, out: Tensor, grads: tuple[Tensor, ...]) -> Answer:
        heads = self._gate.heads
        real = real_tokens(self._workload, self._device)[:, None, :, None]
        out, *parts = (run.standard(x)[:, list(heads)] for x in (out, *grads[:3]))
        grad_bias = None if run.bias_gradient is None else run.bias_gradient(grads[3], heads)
        return Answer(torch.where(real, out, 0), *parts, grad_bias)


def gradients(run: Run, out: Tensor, *, retain_graph: bool = False) -> tuple[Tensor, ...]:
    """Return the gradients of the leaves."""
    with run.context():
        return torch.autograd.grad(out, run.leaves, run.grad_out, retain_graph=retain_graph)


def bit_equal(run: Run) -> bool:
    """Return whether two runs of forward and backward give the same bits."""
    first, second = ([out, *gradients(run, out)] for out in (run.forward(), run.forward()))
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
