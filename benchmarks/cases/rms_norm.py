"""RMS norm: forward and backward beside its peers and the speed of a copy."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.elementwise import add_common_arguments, measure

if TYPE_CHECKING:
    from benchmarks.session import Session
    from benchmarks.tables import Claim

SUMMARY = "RMS norm, alone and behind a residual addition, beside F.rms_norm, torch.compile and Liger-Kernel"

_ROWS, _SIZES = (
    32_768,
    (
        512,
        1024,
    ),
)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the case's options."""
    add_common_arguments(parser)
    parser.add_argument("--widths", type=int, nargs="+", metavar="N", help="rows' widths, instead of the case's own")


def run(arguments: Namespace, session: Session) -> None:
    """Measure and print the table."""
    from benchmarks.elementwise import places, rms_norm

    sizes = arguments.widths or (_SIZES[:1] if session.quick else _SIZES)
    measure(
        session,
        rms_norm.operators(arguments.rows or _ROWS, sizes, arguments.dtype, session.device),
        title="RMS norm",
        yardstick=rms_norm.YARDSTICK,
        place=places.rms_norm,
        names=rms_norm.NAMES,
        chosen=arguments.implementations,
        targets=rms_norm.TARGETS,
    )


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Return the times to reach for which the rows of one run have a measurement."""
    from benchmarks.bandwidth import time_claims
    from benchmarks.elementwise import places, rms_norm

    return time_claims([row for row in rows if "operation" in row], rms_norm.TARGETS, "fat5-triton", places.rms_norm)
