"""Classification with the encoder alone, beside Transformers' encoder-decoder head."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.session import Session
    from benchmarks.tables import Claim

SUMMARY = "classification of texts with the encoder alone, beside Transformers' T5ForSequenceClassification"

_SIZES = ("tiny", "small", "base", "large")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the case's options."""
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    parser.add_argument("--size", choices=_SIZES, default="base", help="the body, of T5 v1.1")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="type of weights and states")
    parser.add_argument("--batch", default=32, help="texts, an even number", **number)
    parser.add_argument("--length", default=512, help="tokens of a row", **number)
    parser.add_argument("--dropout", type=float, default=0.0, metavar="P", help="T5's dropout rate in training")
    parser.add_argument("--implementations", nargs="+", metavar="NAME", help="by default all, --quick: not compiled")


def run(arguments: Namespace, session: Session) -> None:
    """Measure full rows, then a batch that is half padding, and print both."""
    from benchmarks.heads import report
    from benchmarks.heads.models import choose
    from benchmarks.heads.stage import Stage
    from benchmarks.heads.workload import Workload
    from benchmarks.tables import problems

    implementations = choose(arguments.implementations, quick=session.quick)
    rows = []
    for padded in (False,) if session.quick else (False, True):
        workload = Workload(
            arguments.size, arguments.dtype, arguments.batch, arguments.length, padded, dropout=arguments.dropout
        )
        stage = Stage(workload, session.device)
        for implementation in implementations:
            rows += session.measure(stage.subject(implementation))
    print(f"\nheads\n{report.show(rows)}")
    print("\n" + "\n".join(map(str, claims(rows))))
    print(problems(rows, report.describe))


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Return every figure to reach for which the rows of one run have a measurement."""
    from benchmarks.heads import report

    return report.claims(rows)
