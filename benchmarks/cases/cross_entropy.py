"""Cross-entropy of given logits, beside eager PyTorch, torch.compile and Liger-Kernel."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.session import Session
    from benchmarks.tables import Claim

SUMMARY = "cross-entropy with z-loss of given logits, forward and backward, beside torch.compile and Liger-Kernel"

ROWS, VOCAB = 16_384, 32_768
TARGET_MS = 0.65
"""To reach at ROWS x VOCAB in bf16, z-loss included."""

_OTHERS = ((16_384, 32_128), (16_384, 32_100), (8192, 50_257), (8192, 65_536), (2048, 250_112))
_MIB = 2**20


def add_arguments(parser: ArgumentParser) -> None:
    """Add the case's options."""
    several: dict[str, Any] = {"nargs": "+"}
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    parser.add_argument("--implementations", metavar="NAME", help="by default all", **several)
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="by default bf16", **several)
    parser.add_argument("--rows", help=f"tokens, {ROWS:,} by default", **number)
    parser.add_argument("--vocab", help="vocabularies, by default several, or one with --quick", **several, **number)
    parser.add_argument("--ignored", type=float, default=0.0, metavar="SHARE", help="tokens that are ignored")
    tiles = "measure every tile worth trying of the kernels instead of the peers, the present choice first"
    parser.add_argument("--tiles", action="store_true", help=tiles)


def run(arguments: Namespace, session: Session) -> None:
    """Measure and print, the figure to reach last."""
    from benchmarks.bandwidth import copy_speed, show
    from benchmarks.loss.implementations import COMPILED, choose, tiles_of
    from benchmarks.loss.stage import Stage
    from benchmarks.loss.workload import Workload
    from benchmarks.tables import problems

    sizes = [(ROWS, VOCAB), *(() if session.quick else _OTHERS)]
    if arguments.vocab:
        sizes = [(ROWS, vocab) for vocab in arguments.vocab]
    workloads = [
        Workload(arguments.rows or rows, vocab, dtype=dtype, ignored=arguments.ignored)
        for dtype in arguments.dtype or ("bf16",)
        for rows, vocab in sizes
    ]
    chosen = {w: list(tiles_of(w)) if arguments.tiles else choose(arguments.implementations, w) for w in workloads}
    copy = copy_speed(session)
    rows = []
    for workload, implementations in chosen.items():
        stage = Stage(workload, session.device, copy)
        yardstick = implementations[0].name if arguments.tiles else COMPILED
        table = "tiles" if arguments.tiles else "times"
        for implementation in implementations:
            rows += session.measure(stage.subject(implementation, {"table": table}, yardstick))
    print(f"\ncross_entropy\n{show(rows, place)}\n")
    for claim in claims(rows):
        print(claim)
    print(problems(rows, place))


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Return the times to reach for which the rows of one run have a measurement."""
    from benchmarks.bandwidth import time_claims
    from benchmarks.loss.stage import PHASE
    from benchmarks.loss.workload import Workload

    standard = {(place(Workload(ROWS, VOCAB).columns), PHASE): TARGET_MS}
    times = [row for row in rows if row.get("table") == "times"]
    names = ("fat5-triton", "fat5-triton-overwrite")
    return [claim for name in names for claim in time_claims(times, standard, name, place)]


def place(row: Mapping[str, Any]) -> str:
    """Return the workload of a row in a few words."""
    ignored = float(row["ignored"])
    words = f"{row['dtype']} {row['rows']} x {row['vocab']}"
    return f"{words} {ignored:.0%} ignored" if ignored else words
