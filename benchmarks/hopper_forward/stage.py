"""One workload, and the subjects that are measured at it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.attention.catalogue import YARDSTICK, catalogue
from benchmarks.attention.gate import poisoned_memory
from benchmarks.attention.own import relative_bias
from benchmarks.attention.workload import Inputs, Workload
from benchmarks.subject import GateError, Phase, Prepared, Subject
from fat5.ops.attention.hopper.configuration import Configuration, ForwardShape, forward_configuration
from fat5.ops.attention.hopper.dispatch import unavailable
from fat5.ops.attention.hopper.self_check import LARGEST_ERROR
from fat5.ops.attention.problem import Problem


class Stage:
    """One workload, before which the shapes come one after the other."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self.workload, self._device = workload, device

    @functools.cached_property
    def _inputs(self) -> Inputs:
        return Inputs.draw(self.workload, self._device)

    @functools.cached_property
    def _problem(self) -> Problem:
        q, k, v = (x.transpose(1, 2) for x in (self._inputs.q, self._inputs.k, self._inputs.v))
        table = relative_bias(self._inputs.table, self.workload).by_distance().table
        nothing = dict.fromkeys(("offsets", "key_starts", "key_lengths", "cu_seqlens_q", "cu_seqlens_k", "seed"))
        return Problem(
            q, k, v, table, "distance", 0, softmax_scale=1.0, causal=self.workload.causal, dropout_p=0.0, **nothing
        )

    @functools.cached_property
    def _portable(self) -> Tensor:
        from fat5.ops.attention import launch

        return launch.run_forward(self._problem)[0].double()

    def configuration(self, shape: ForwardShape | None = None) -> Configuration:
        """Return the constants of a shape, or of today's choice."""
        chosen = forward_configuration(self._problem)
        return chosen if shape is None else dataclasses.replace(chosen, shape=shape)

    def telling(self, shapes: Mapping[int, Sequence[ForwardShape]]) -> list[ForwardShape]:
        """Return those of its head dimension, without half tiles of keys where no query sees half of one."""
        own = shapes[self.workload.head_dim]
        return [shape for shape in own if self.configuration(shape).halves == shape.halves]

    def yardstick(self) -> Subject:
        """Return cuDNN's kernel without a bias."""
        implementation = catalogue()[YARDSTICK]

        def prepare() -> Prepared:
            run = implementation.prepare(self.workload, self._inputs)
            return Prepared(lambda: 0.0, (Phase("forward", lambda: run.forward, self.workload.forward_flops),))

        reason = implementation.unavailable(self.workload, self._device)
        return Subject(YARDSTICK, self.workload.columns, prepare, reason, YARDSTICK)

    def subject(self, shape: ForwardShape, reason: str | None) -> Subject:
        """Return the Hopper kernel in a shape; `reason` is why it cannot run, or None."""

        def prepare() -> Prepared:
            if reason is not None and unavailable() is None:
                raise GateError(reason)  # it could run here, and does not
            from fat5.ops.attention.hopper import launch

            configuration = self.configuration(shape)

            def check() -> float:
                with poisoned_memory(self._device, python_too=True):
                    out = launch.run_forward(self._problem, configuration)[0]
                error = float((out.double() - self._portable).norm() / self._portable.norm())
                if not error <= LARGEST_ERROR:
                    raise GateError(f"the output is {error:.1e} of its norm from the portable kernel's")
                return error / LARGEST_ERROR

            phase = Phase(
                "forward",
                lambda: functools.partial(launch.run_forward, self._problem, configuration),
                self.workload.forward_flops,
            )
            today = shape == self.configuration().shape
            return Prepared(check, (phase,), figures=lambda: dataclasses.asdict(shape) | {"today": today})

        return Subject(str(shape), self.workload.columns, prepare, unavailable(), YARDSTICK)
