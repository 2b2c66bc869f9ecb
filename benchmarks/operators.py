"""Differentiable operators bound by memory: one gate and one way of timing for FAT5's and their peers'."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.gate import FORWARD_FACTOR, GRADIENT_FACTOR, poisoned_memory
from benchmarks.subject import GateError, Phase, Prepared, Subject

Function = Callable[..., Any]
"""Maps the inputs to a tensor or a tuple of tensors."""

_LARGEST_LIMIT = 0.1  # a limit near 1 would let zeros pass
_FLOAT32_ROUNDING = 2.0**-23


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operator.

    Attributes:
        name: As the tables show it.
        function: Computes it.
        compiled: Give it to torch.compile first.
        unavailable: Why it cannot run here, or None.
    """

    name: str
    function: Function
    compiled: bool = False
    unavailable: str | None = None

    @property
    def own(self) -> bool:
        """It is FAT5's."""
        return self.name.startswith("fat5-")


class Operator:
    """An operator at one workload, before which its implementations come one after the other.

    Args:
        columns: Columns that name the workload.
        reference: The formula, in the type of what it is given.
        inputs: By name; all take a gradient.
        grads: Gradients of the outputs, by the names of the outputs.
        forward_bytes: Bytes that a forward must move.
        backward_bytes: Bytes that a backward must move.
    """

    def __init__(
        self,
        columns: Mapping[str, Any],
        reference: Function,
        inputs: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        *,
        forward_bytes: int,
        backward_bytes: int,
    ) -> None:
        self._columns, self._reference, self._inputs, self._grads = columns, reference, inputs, grads
        self._bytes = {"forward": forward_bytes, "backward": backward_bytes}
        self._names = (*grads, *(f"grad_{name}" for name in inputs))

    def subject(self, implementation: Implementation, *, yardstick: str, copy_gb_per_s: float | None) -> Subject:
        """Return one implementation at this workload; see `benchmarks.bandwidth.copy_speed`."""
        return Subject(
            implementation=implementation.name,
            parameters=self._columns,
            prepare=lambda: self._prepare(implementation, copy_gb_per_s),
            unavailable=implementation.unavailable,
            yardstick=yardstick,
        )

    def _prepare(self, implementation: Implementation, copy_gb_per_s: float | None) -> Prepared:
        function = implementation.function
        if implementation.compiled:
            torch.compiler.reset()
            # The timing runs a backward again and again on one graph; what is set later is compiled anew.
            torch._functorch.config.donated_buffer = False
            function = torch.compile(lambda *inputs: implementation.function(*inputs), dynamic=False)

        # Some peers write into what they are given, so that each run gets its own; strides stay.
        def leaves() -> list[Tensor]:
            return [_like(x).requires_grad_() for x in self._inputs.values()]

        def gradients() -> list[Tensor]:
            return [g.clone() for g in self._grads.values()]

        def both(inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
            outputs = _outputs(function(*inputs))
            return [*outputs, *torch.autograd.grad(outputs, inputs, grads)]

        def check() -> float:
            given = leaves(), gradients()
            with poisoned_memory(given[0][0].device, python_too=implementation.own):
                answer = both(*given)
            return self._gate(answer)

        def forward() -> Callable[[], Any]:
            return functools.partial(function, *leaves())

        def backward() -> Callable[[], Any]:
            inputs, grads = leaves(), gradients()
            outputs = _outputs(function(*inputs))
            return lambda: torch.autograd.grad(outputs, inputs, grads, retain_graph=True)

        def figures() -> dict[str, Any]:
            own = {}
            if implementation.own:
                first, second = (both(leaves(), gradients()) for _ in range(2))
                own = {"bit_equal": all(torch.equal(a, b) for a, b in zip(first, second, strict=True))}
            return {"copy_gb_per_s": copy_gb_per_s} | own

        phases = (
            Phase("forward", forward, bytes=self._bytes["forward"]),
            Phase("backward", backward, bytes=self._bytes["backward"]),
        )
        return Prepared(check, phases, peak=functools.partial(both, leaves(), gradients()), figures=figures)

    @functools.cached_property
    def _answers(self) -> tuple[list[Tensor], list[Tensor]]:
        return self._answer(torch.float64), self._answer(None)

    def _answer(self, dtype: torch.dtype | None) -> list[Tensor]:
        leaves = [_like(x.detach().to(dtype or x.dtype)).requires_grad_() for x in self._inputs.values()]
        outputs = _outputs(self._reference(*leaves))
        grads = [g.to(x.dtype) for g, x in zip(self._grads.values(), outputs, strict=True)]
        return [x.detach() for x in (*outputs, *torch.autograd.grad(outputs, leaves, grads))]

    def _gate(self, answer: Sequence[Tensor]) -> float:
        exact, plain = self._answers
        worst = 0.0
        for name, got, truth, simple in zip(self._names, answer, exact, plain, strict=True):
            if got.shape != truth.shape:
                raise GateError(f"{name} has shape {list(got.shape)}, expected {list(truth.shape)}")
            factor = FORWARD_FACTOR if name in self._grads else GRADIENT_FACTOR
            # Where plain PyTorch happens to be exact, some rounding is still allowed.
            rounding = max(torch.finfo(got.dtype).eps / 4, _FLOAT32_ROUNDING)
            limit = min(factor * max(_error(simple, truth), rounding), _LARGEST_LIMIT)
            error = _error(got, truth)
            if not error <= limit:
                raise GateError(f"{name} is off by {error:.2e} of its norm, more than the {limit:.2e} allowed")
            worst = max(worst, error / limit)
        return worst


def _like(x: Tensor) -> Tensor:
    """Return a copy with the strides of x, gaps between rows included."""
    if x.is_contiguous():
        return x.detach().clone()
    size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    room = torch.zeros(size, dtype=x.dtype, device=x.device)
    return room.as_strided(x.shape, x.stride()).copy_(x.detach())


def _outputs(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _error(x: Tensor, truth: Tensor) -> float:
    return float((x.double() - truth).norm() / truth.norm())
