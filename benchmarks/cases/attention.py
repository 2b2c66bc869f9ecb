"""Attention with T5's bias, beside PyTorch's kernels and FlexAttention."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.session import Session
    from benchmarks.tables import Claim

SUMMARY = "attention with T5's learned bias and its gradient, beside SDPA, cuDNN, FlashAttention-2 and FlexAttention"

_TABLES = ("must-reach", "sweep", "memory", "dense", "packed", "documents")
_LAYOUT = (
    "how q, k, v lie in memory for all implementations: [B, L, H, D], as projections write it, or [B, H, L, D] "
    "(default: %(default)s)"
)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the case's options."""
    several: dict[str, Any] = {"nargs": "+"}
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    tables = f"some of {', '.join(_TABLES)}; by default all, or the first with --quick"
    parser.add_argument("--shapes", choices=_TABLES, metavar="TABLE", help=tables, **several)
    parser.add_argument("--implementations", metavar="NAME", help="by default all but the very slow", **several)
    types = "by default bf16, and fp16 in the first table"
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help=types, **several)
    parser.add_argument("--lengths", help="instead of a table's own, like all that follows", **several, **number)
    parser.add_argument("--head-dims", help="head dimensions", **several, **number)
    parser.add_argument("--masks", choices=("full", "causal"), help="by default both where it matters", **several)
    parser.add_argument("--layout", choices=("tokens", "heads"), default="tokens", help=_LAYOUT)
    parser.add_argument("--heads", help="number of heads", **number)
    parser.add_argument("--tokens", help="tokens of a batch, 16,384 by default", **number)


def run(arguments: Namespace, session: Session) -> None:
    """Measure the tables and print them, what was missed last."""
    from benchmarks.attention import report
    from benchmarks.attention.catalogue import YARDSTICK, choose
    from benchmarks.attention.tables import MATERIALISED, TABLES, Options
    from benchmarks.tables import problems

    options = Options(
        implementations=choose(arguments.implementations, session.device),
        chosen=arguments.implementations is not None,
        dtypes=arguments.dtype,
        lengths=arguments.lengths,
        head_dims=arguments.head_dims,
        masks=arguments.masks,
        heads=arguments.heads,
        tokens=arguments.tokens,
        layout=arguments.layout,
    )
    names = arguments.shapes or (("must-reach",) if session.quick else _TABLES)
    show = {
        "must-reach": lambda rows: report.show_times(rows, compare_with=YARDSTICK),
        "sweep": report.show_sweep,
        "memory": report.show_memory,
        "dense": lambda rows: report.show_times(rows, compare_with=MATERIALISED),
        "packed": lambda rows: report.show_times(rows, compare_with=MATERIALISED),
        "documents": lambda rows: report.show_times(rows, compare_with=YARDSTICK),
    }
    measured = {name: TABLES[name](session, options) for name in names}
    rows = [row for part in measured.values() for row in part]
    for name, part in measured.items():
        print(f"\nattention, {name}\n{show[name](part)}")
    print("\n" + "\n".join(map(str, claims(rows))))
    for equal, verdict in ((True, "bit-equal"), (False, "NOT bit-equal")):
        names = sorted({row["implementation"] for row in rows if row.get("bit_equal") is equal})
        if names:
            print(f"two runs of forward and backward {verdict}: {', '.join(names)}")
    print(problems(rows, report.describe))


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Return every figure to reach for which the rows of one run have a measurement."""
    from benchmarks.attention import report

    return report.claims(rows)
