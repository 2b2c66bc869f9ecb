"""What bf16 costs: loss curves in float32, and in bf16 with and without Kahan summation in the optimizer."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.session import Session
    from benchmarks.tables import Claim

SUMMARY = "loss curves on the shipped text: fp32, bf16 with Kahan summation, bf16 without"

DISTANCE = 0.01
"""How far from fp32 the loss with Kahan summation may end, as a share of it."""

_STEPS, _QUICK_STEPS = 1000, 100


def add_arguments(parser: ArgumentParser) -> None:
    """Add the case's options."""
    steps = f"optimizer steps of each run; by default {_STEPS:,}, or {_QUICK_STEPS} with --quick"
    parser.add_argument("--steps", type=int, metavar="N", help=steps)


def run(arguments: Namespace, session: Session) -> None:
    """Train three times, record the curves, and say how far the losses end from float32."""
    import tempfile
    from pathlib import Path

    from benchmarks.precision.runs import BASE, RUNS, Curve, prepare_text, subject
    from benchmarks.registry import UsageError
    from benchmarks.tables import format_table, number, problems

    steps = arguments.steps or (_QUICK_STEPS if session.quick else _STEPS)
    if steps < 1:
        raise UsageError(f"--steps is {steps}, expected at least 1")
    curves: dict[str, Curve] = {}
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare_text(folder)
        for name in RUNS:
            rows += session.measure(subject(name, steps, folder, curves))
    for name, curve in curves.items():
        base = {"table": "curve", "steps": steps, "implementation": name, "status": "ok"}
        session.record([base | {"step": step, "loss": loss} for step, loss in curve.points()])

    fine = [row for row in rows if "last_loss" in row]
    lines = [
        [
            row["implementation"],
            number(row["last_loss"], ".4f"),
            number(100 * row["distance"] if row["distance"] is not None else None, "+.2f"),
            number(row["eval_loss"], ".4f"),
        ]
        for row in fine
    ]
    tail = max((row["tail"] for row in fine), default=0)
    header = [f"precision, {steps:,} steps", f"loss, last {tail}", f"% from {BASE}", "held-out loss"]
    print(f"\n{format_table(header, lines)}")
    print("\n" + "\n".join(map(str, claims(rows))))
    print(problems(rows, lambda row: f"{row['steps']} steps"))


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Return how far bf16 with Kahan summation ends from float32 in the rows of one run."""
    from benchmarks.precision.runs import BASE
    from benchmarks.tables import Claim

    distances = {row["implementation"]: row["distance"] for row in rows if "last_loss" in row}
    kahan = distances.get("bf16-kahan")
    far = None if kahan is None else 100 * abs(kahan)
    text = f"bf16 with Kahan summation from {BASE}, of the loss"
    return [Claim(text, far, 100 * DISTANCE, at_most=True, unit=" %")]
