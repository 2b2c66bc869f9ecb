"""The denoising collator: tokens per second, fill, workers, resuming."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.session import Session
    from benchmarks.tables import Claim

SUMMARY = "the denoising collator: real tokens per second, slots filled, workers, resuming"

TOKENS_A_SECOND, FILL, SPEED_UP_OF_4_WORKERS, RESUME_S = 8e6, 0.97, 3.0, 5.0
"""Figures to reach, on log-normal documents (median 400 tokens, sigma 1, seed 0)."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the case's options."""
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    parser.add_argument("--denoisers", default="fat5", help="preset of the mixture")
    parser.add_argument("--workers", nargs="+", default=[0, 1, 2, 4, 8], help="worker processes", **number)
    parser.add_argument("--cores", help="cores for the workers and their reader, all by default", **number)
    parser.add_argument("--documents", default=100_000, help="documents that batches are made of", **number)
    parser.add_argument("--resumed-documents", default=1_000_000, help="documents before a resumed run", **number)


def run(arguments: Namespace, session: Session) -> None:
    """Measure one core, then workers."""
    from benchmarks.collator.measurements import Pipeline, cores
    from benchmarks.tables import format_table, number, problems
    from fat5.data.denoising_config import DenoisingConfig

    pipeline = Pipeline(
        DenoisingConfig(denoisers=arguments.denoisers), arguments.documents, arguments.resumed_documents
    )
    with cores(1):
        rows = [
            row
            for subject in (pipeline.one_core(), pipeline.planning(), pipeline.resuming())
            for row in session.measure(subject)
        ]
    with cores(arguments.cores):
        loaded = [
            row
            for pin_memory in (False, True)
            for workers in arguments.workers
            for row in session.measure(pipeline.loading(workers, pin_memory))
        ]
    timed = [row for row in rows if "p50_ms" in row]
    lines = [
        [
            row["phase"],
            number(row["p50_ms"], ".1f"),
            number(_millions(row, "tokens"), ".1f"),
            number(_millions(row, "documents"), ".1f"),
            number(row.get("fill"), ".4f"),
            number(row.get("encoder_fill"), ".4f"),
            number(row.get("decoder_fill"), ".4f"),
        ]
        for row in timed
    ]
    header = ["one core", "ms", "M tokens/s", "M documents/s", "fill", "encoder", "decoder"]
    print(f"\ncollator\n{format_table(header, lines)}")
    speeds = _speeds(loaded)
    lines = [
        [
            f"{workers} workers{', pinned' if pinned else ''}",
            number(speed / 1e6, ".1f"),
            number(speed / speeds[1, pinned] if (1, pinned) in speeds else None, ".2f"),
        ]
        for (workers, pinned), speed in speeds.items()
    ]
    print(format_table(["loader", "M tokens/s", "x 1 worker"], lines))
    print("\n" + "\n".join(map(str, claims([*rows, *loaded]))))
    print(problems([*rows, *loaded], lambda row: f"{row['table']}, {row.get('workers', 0)} workers,"))


def _speeds(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[int, bool], float]:
    loaded = [row for row in rows if row["table"] == "workers" and "p50_ms" in row]
    return {(row["workers"], row["pin_memory"]): row["tokens_per_s"] for row in loaded}


def _millions(row: Mapping[str, Any], what: str) -> float | None:
    return row[f"{what}_per_s"] / 1e6 if f"{what}_per_s" in row else None


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Return the figures to reach beside those of the rows of one run."""
    from benchmarks.tables import Claim

    speeds = _speeds(rows)
    by_phase = {row["phase"]: row for row in rows if row["table"] == "one core" and "p50_ms" in row}
    collate, resume = by_phase.get("collate", {}), by_phase.get("resume", {})
    found = [
        Claim("real tokens/s on one core, millions", _millions(collate, "tokens"), TOKENS_A_SECOND / 1e6, unit=""),
        Claim("share of all slots filled", collate.get("fill"), FILL, unit=""),
    ]
    if resume:
        found.append(Claim("resuming", resume["p50_ms"] / 1e3, RESUME_S, at_most=True, unit=" s"))
    for pinned in (False, True):
        if {(1, pinned), (4, pinned)} <= speeds.keys():
            text = f"4 workers over 1{', pinned' if pinned else ''}"
            found.append(Claim(text, speeds[4, pinned] / speeds[1, pinned], SPEED_UP_OF_4_WORKERS))
    return found
