"""The runs of one model as subjects: each is trained once, and compared with those before it."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.scaling.launch import Outcome, launch
from benchmarks.scaling.plan import SAME, TIMES, WINDOWS, Run, Scale
from benchmarks.subject import GateError, Prepared, Subject

ONE, ACCUMULATED = "one", "one, accumulating"


@dataclass(frozen=True)
class Tolerance:
    """How far a loss may be from the one that it should equal, as a share of it.

    Attributes:
        first: At the first step, from the same weights and batches: only the order of sums differs.
        later: Behind it, where training has carried the rounding of each step on.
    """

    first: float
    later: float

    @staticmethod
    def of_device() -> Tolerance:
        """Return that of the type that a run on this machine has: bf16, or float32."""
        bf16 = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8
        return Tolerance(1e-3, 0.02) if bf16 else Tolerance(1e-5, 1e-4)


class Stage:
    """Makes the subjects of one model.

    Args:
        scale: How all runs go.
        strategies: Names in STRATEGIES.
        resume: Whether runs go on from the checkpoint of several processes.
        seconds: Longest time of a run.
        tolerance: How far losses may be from those of one process.
        extra: More settings of every run, `section.key=value`.
    """

    def __init__(
        self,
        scale: Scale,
        strategies: Sequence[str],
        *,
        resume: bool,
        seconds: float,
        tolerance: Tolerance,
        extra: Sequence[str] = (),
    ) -> None:
        self._scale, self._strategies, self._resume = scale, strategies, resume
        self._seconds, self._tolerance, self._extra = seconds, tolerance, extra
        self._outcomes: dict[tuple[str, str], Outcome] = {}

    def subjects(self) -> Iterator[Subject]:
        """Yield the runs in their order: one process, the one that takes the others' place, several, resumed ones."""
        several = self._scale.processes
        yield self._subject(Run(ONE, 1, TIMES))
        yield self._subject(Run(ACCUMULATED, 1, SAME, accumulation=several))
        for name in self._strategies:
            sharding = name != "ddp" and several == 1
            unavailable = "one process has nothing to shard" if sharding else None
            for batch in (SAME, TIMES):
                yield self._subject(Run(name, several, batch, strategy=name), unavailable)
            for processes in dict.fromkeys((1, several)) if self._resume else ():
                yield self._resumed(name, processes, unavailable)

    def _subject(self, run: Run, unavailable: str | None = None) -> Subject:
        def prepare() -> Prepared:
            outcome = self._outcomes[run.name, run.batch] = self._train(run)
            return Prepared(lambda: self._check(run, outcome), figures=lambda: self._figures(run, outcome))

        return Subject(run.name, self._columns("runs", run), prepare, unavailable)

    def _resumed(self, strategy: str, processes: int, unavailable: str | None) -> Subject:
        """A run that goes on from the middle of the run on the same batch, alone or with as many processes."""
        first = Run(strategy, self._scale.processes, SAME, strategy=strategy)
        run = Run(
            strategy,
            processes,
            SAME,
            accumulation=self._scale.processes // processes,
            strategy=strategy if processes > 1 else None,
            resume=first.checkpoint(self._scale),
        )

        def prepare() -> Prepared:
            outcome = self._train(run)

            def distances() -> list[float]:
                return self._distances(outcome, (strategy, SAME), after=self._scale.steps // 2)

            def figures() -> Mapping[str, Any]:
                return {"loss": _last_loss(outcome), "loss_distance": max(distances())}

            return Prepared(lambda: _within(distances(), self._tolerance.later), figures=figures)

        return Subject(strategy, self._columns("resumed", run), prepare, unavailable)

    def _columns(self, table: str, run: Run) -> dict[str, Any]:
        return {
            "table": table,
            "model": self._scale.model,
            "several": self._scale.processes,
            "processes": run.processes,
            "batch": run.batch,
            "encoder_budget": run.slots(self._scale),
            "accumulation": run.accumulation,
            "steps": self._scale.steps,
            "compiled": self._scale.compiled,
        }

    def _train(self, run: Run) -> Outcome:
        folder = self._scale.work / run.folder
        # One process of its own stands for `fat5 pretrain` alone: under torchrun it would be wrapped as one of several.
        outcome = launch(
            run.settings(self._scale, self._extra),
            folder,
            processes=run.processes,
            torchrun=run.strategy is not None,
            seconds=self._seconds,
        )
        if run.strategy is None or run.batch != SAME or run.resume is not None:
            # Nothing goes on from its checkpoints, which are gigabytes.
            shutil.rmtree(folder, ignore_errors=True)
        return outcome

    def _check(self, run: Run, outcome: Outcome) -> float:
        losses = list(outcome.losses.values())
        if not losses or not losses[-1] < losses[0]:
            raise GateError(f"nothing was learned: the losses are {[round(loss, 3) for loss in losses]}")
        if run.batch == SAME and run.strategy is not None:
            first, *later = self._distances(outcome, (ACCUMULATED, SAME))
            return max(_within([first], self._tolerance.first), _within(later, self._tolerance.later))
        return 0.0

    def _distances(self, outcome: Outcome, other: tuple[str, str], after: int = 0) -> list[float]:
        """Return how far each logged loss is from the other run's at the same step, as a share of it."""
        if other not in self._outcomes:
            raise GateError(f"the run {other[0]!r} to compare with has failed")
        expected, got = self._outcomes[other].losses, outcome.losses
        steps = [step for step in expected if step > after]
        if not steps or not set(steps) <= got.keys():
            raise GateError(f"losses of steps {sorted(got)} were logged, expected {steps}")
        return [abs(got[step] / expected[step] - 1) for step in steps]

    def _figures(self, run: Run, outcome: Outcome) -> Mapping[str, Any]:
        one = self._outcomes.get((ONE, TIMES))
        rate = _tokens_per_second(outcome, self._scale.steps)
        share = None if one is None else rate / run.processes / _tokens_per_second(one, self._scale.steps)
        alone, busy = outcome.communication or (None, None)
        compared = run.batch == SAME and run.strategy is not None
        distances = self._distances(outcome, (ACCUMULATED, SAME)) if compared else None
        return {
            "tokens_per_s": rate,
            "tokens_per_s_per_process": rate / run.processes,
            "share_of_one": share,
            "peak_reserved_gib": outcome.peak_reserved_gib,
            "share_communication_alone": alone,
            "share_communication": busy,
            "first_step_s": sum(entry.get("warm_up_seconds", 0.0) for entry in outcome.log_history),
            "loss": _last_loss(outcome),
            "first_loss_distance": None if distances is None else distances[0],
            "loss_distance": None if distances is None else max(distances),
        }


def clear(scale: Scale) -> None:
    """Remove what the runs of a model left."""
    shutil.rmtree(scale.work, ignore_errors=True)


def _within(distances: Sequence[float], tolerance: float) -> float:
    """Return the share of the tolerance that the largest distance takes.

    Raises:
        GateError: A distance is larger, or no number.
    """
    far = [distance for distance in distances if not distance <= tolerance]
    if far:
        raise GateError(f"losses are up to {max(far):.3%} from those they should equal, {tolerance:.3%} allowed")
    return max(distances) / tolerance


def _tokens_per_second(outcome: Outcome, steps: int) -> float:
    """Return the median over the log windows behind the first one, all processes together."""
    window = steps // WINDOWS
    rates = [e["tokens_per_second"] for e in outcome.log_history if e["step"] > window and "tokens_per_second" in e]
    return statistics.median(rates)


def _last_loss(outcome: Outcome) -> float:
    return list(outcome.losses.values())[-1]
