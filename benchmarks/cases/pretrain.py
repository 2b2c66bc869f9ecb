"""The whole pretraining step, beside Transformers' T5: time, tokens, memory, and where the time goes."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.session import Session
    from benchmarks.tables import Claim

SUMMARY = "the whole pretraining step beside Transformers' T5: tokens/s, memory, shares of time"

_TABLES = ("8x64", "4x128", "documents", "base", "long")
_SUITED = {
    "4x128": ("transformers-compiled", "fat5-compiled", "fat5-cuda-graphs"),
    "documents": ("fat5-compiled", "fat5-cuda-graphs"),
    "base": ("fat5-compiled", "fat5-cuda-graphs"),
    "long": ("fat5-compiled", "fat5-eager"),
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the case's options."""
    several: dict[str, Any] = {"nargs": "+"}
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    tables = f"some of {', '.join(_TABLES)}, or smoke (a tiny model, to see that all runs); by default all but smoke"
    parser.add_argument("--tables", choices=(*_TABLES, "smoke"), metavar="TABLE", help=tables, **several)
    parser.add_argument("--implementations", metavar="NAME", help="by default all that suit a table", **several)
    parser.add_argument("--steps", default=10, help="steps of a round", **number)
    parser.add_argument("--rounds", default=5, help="rounds, 3 with --quick", **number)
    parser.add_argument("--workers", default=4, help="worker processes that feed real documents", **number)
    parser.add_argument("--documents", default=100_000, help="documents to draw", **number)


def run(arguments: Namespace, session: Session) -> None:
    """Measure table by table; each row is printed as it comes, the figures to reach at the end."""
    from benchmarks.pretraining import report
    from benchmarks.pretraining.stage import Stage
    from benchmarks.pretraining.steps import IMPLEMENTATIONS
    from benchmarks.registry import UsageError
    from benchmarks.tables import problems

    unknown = sorted(set(arguments.implementations or ()) - IMPLEMENTATIONS.keys())
    if unknown:
        raise UsageError(f"no implementation {unknown[0]!r}; expected some of {', '.join(IMPLEMENTATIONS)}")
    rounds = min(arguments.rounds, 3) if session.quick else arguments.rounds
    rows = []
    print(report.HEADER, flush=True)
    for table in arguments.tables or _TABLES:
        stage = Stage(
            table,
            session.device,
            steps=arguments.steps,
            rounds=max(rounds, 2),
            workers=arguments.workers,
            documents=arguments.documents,
        )
        for name in _chosen(table, arguments.implementations, IMPLEMENTATIONS):
            for row in session.measure(stage.subject(IMPLEMENTATIONS[name])):
                rows.append(row)
                print(report.line(row), flush=True)
    print("\n" + "\n".join(map(str, claims(rows))))
    print(problems(rows, lambda row: str(row["table"])))


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Return the figures to reach beside those of the rows of one run."""
    from benchmarks.pretraining import report

    return report.claims(rows)


def _chosen(table: str, named: list[str] | None, known: Mapping[str, Any]) -> list[str]:
    return list(_SUITED.get(table, known)) if named is None else named
