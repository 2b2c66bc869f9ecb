"""What a case gives to the session: one implementation at one workload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


class GateError(Exception):
    """An implementation's answer is wrong; the message says which part of it, and by how much."""


@dataclass(frozen=True)
class Phase:
    """One timed step.

    Attributes:
        name: "forward", "backward", ...
        prepare: Makes the function that is timed; what this does itself is not.
        flops: Floating-point operations of the step, for its TFLOP/s.
        bytes: Bytes that the step must move, for its GB/s.
        amounts: What else the step gets done, by name, for columns such as `tokens_per_s`.
        on_host: The step is the host's work: it is timed with the wall clock on every machine.
    """

    name: str
    prepare: Callable[[], Callable[[], object]]
    flops: float | None = None
    bytes: float | None = None
    amounts: Mapping[str, float] = field(default_factory=dict)
    on_host: bool = False


@dataclass(frozen=True)
class Prepared:
    """An implementation with its inputs, ready to run.

    Attributes:
        check: The correctness gate. Returns the share of the tolerance that the worst error takes, at most 1, and
            raises GateError beyond.
        phases: The steps to time; may be empty.
        peak: Runs all steps once, to find the peak of memory; None to leave it out.
        held_mib: Memory that belongs to the implementation and is held before `peak` runs, such as a bias that it needs
            materialised.
        figures: More columns, such as whether two runs are bit-equal; runs after the gate.
    """

    check: Callable[[], float]
    phases: tuple[Phase, ...] = ()
    peak: Callable[[], object] | None = None
    held_mib: float = 0.0
    figures: Callable[[], Mapping[str, Any]] = dict


@dataclass(frozen=True)
class Subject:
    """One implementation at one workload.

    Attributes:
        implementation: Its name.
        parameters: Columns that name the workload.
        prepare: Makes the inputs and compiles.
        unavailable: Why it cannot run here, or None: a row then says so, and it is no failure.
        yardstick: Name of the implementation whose times are the unit of `ratio`.
    """

    implementation: str
    parameters: Mapping[str, Any]
    prepare: Callable[[], Prepared]
    unavailable: str | None = None
    yardstick: str | None = None
