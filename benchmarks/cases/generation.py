"""Generation: greedy search and beams, short and long inputs, beside Transformers' T5."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.session import Session
    from benchmarks.tables import Claim

SUMMARY = "generation: greedy search and beams, with short and long inputs, beside Transformers' T5"

TOKENS_A_SECOND, OVER_STATIC, BEAMS_OVER_DYNAMIC = 20_000, 3.2, 3.0
"""Figures to reach on an H200: batch 16, 512 encoder tokens, 128 new ones, bf16; the first two greedy."""

_SHORT = 512
_STATIC = ("transformers static", "fat5 static")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the case's options."""
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    parser.add_argument("--lengths", nargs="+", default=[512, 8192, 32768], help="encoder tokens", **number)
    parser.add_argument("--beams", nargs="+", default=[1, 4], help="beams; 1 is greedy search", **number)
    parser.add_argument("--batch", default=16, help="rows", **number)
    parser.add_argument("--new-tokens", default=128, help="tokens to generate a row", **number)
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="type of the model")
    parser.add_argument("--size", choices=("147M", "tiny"), help="the model; tiny without a GPU")
    parser.add_argument(
        "--implementations", nargs="+", metavar="NAME",
        help=f"by default all, but for long inputs and --quick not the static ones, which are compiled for a minute "
        f"each: {', '.join(_STATIC)}",
    )  # fmt: skip


def run(arguments: Namespace, session: Session) -> None:
    """Measure and print a table, and what was missed."""
    from benchmarks.generation.measurements import IMPLEMENTATIONS, Generation
    from benchmarks.generation.workload import Workload
    from benchmarks.registry import UsageError
    from benchmarks.tables import format_table, number, problems

    unknown = [name for name in arguments.implementations or () if name not in IMPLEMENTATIONS]
    if unknown:
        raise UsageError(f"no implementation {unknown[0]!r}; expected some of {', '.join(IMPLEMENTATIONS)}")
    size = arguments.size or ("147M" if session.device.type == "cuda" else "tiny")
    generation = Generation(size, session.device)
    rows: list[dict[str, Any]] = []
    for length in arguments.lengths[:1] if session.quick else arguments.lengths:
        for beams in arguments.beams:
            if beams > 1 and length > 16 * _SHORT:
                continue  # Transformers' cache of each beam of its own would not fit
            workload = Workload(
                size, arguments.batch, length, beams, arguments.new_tokens, arguments.dtype, encode=length <= _SHORT
            )
            names = arguments.implementations or [
                name for name in IMPLEMENTATIONS if name not in _STATIC or (length <= _SHORT and not session.quick)
            ]
            for name in names:
                rows += session.measure(generation.subject(name, workload))
    timed = [row for row in rows if "p50_ms" in row]
    header = ["implementation", "length", "beams", "ms", "tokens/s", "x transformers", "same tokens", "peak MiB"]
    lines = [
        [
            row["implementation"],
            str(row["length"]),
            str(row["beams"]),
            number(row["p50_ms"], ".1f"),
            number(row["tokens_per_s"], ",.0f"),
            number(None if row["ratio"] is None else 1 / row["ratio"], ".2f"),
            number(row["same_tokens"], ".3f"),
            number(row.get("peak_mib"), ",.0f"),
        ]
        for row in timed
    ]
    print(f"\ngeneration, {size}, batch {arguments.batch}, {arguments.new_tokens} new tokens, {arguments.dtype}")
    print(f"{format_table(header, lines)}\nbeyond {_SHORT} tokens without the encoder: its states are given")
    print("\n" + "\n".join(map(str, claims(timed))))
    print(problems(rows, lambda row: f"length {row['length']}, {row['beams']} beams,"))


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Return the rates to reach beside those of the rows of one run."""
    from benchmarks.tables import Claim

    speed = {
        (row["implementation"], row["beams"]): row["tokens_per_s"]
        for row in rows
        if row["length"] == _SHORT and "p50_ms" in row
    }

    def over(ours: tuple[str, int], theirs: tuple[str, int]) -> float | None:
        return speed[ours] / speed[theirs] if {ours, theirs} <= speed.keys() else None

    return [
        Claim("greedy tokens/s", speed.get(("fat5 graph", 1)), TOKENS_A_SECOND, unit=""),
        Claim("greedy over Transformers static", over(("fat5 graph", 1), ("transformers static", 1)), OVER_STATIC),
        Claim("4 beams over Transformers dynamic", over(("fat5 graph", 4), ("transformers", 4)), BEAMS_OVER_DYNAMIC),
    ]
