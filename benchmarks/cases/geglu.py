"""Gated GELU: forward and backward beside its peers and the speed of a copy."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from benchmarks.elementwise import add_common_arguments, measure

if TYPE_CHECKING:
    from benchmarks.session import Session

SUMMARY = "gated GELU, beside eager PyTorch, torch.compile and Liger-Kernel"

_ROWS, _SIZES = 32_768, (2048,)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the case's options."""
    add_common_arguments(parser)
    parser.add_argument("--widths", type=int, nargs="+", metavar="N", help="inner widths, instead of the case's own")


def run(arguments: Namespace, session: Session) -> None:
    """Measure and print the table."""
    from benchmarks.elementwise import geglu, places

    sizes = arguments.widths or (_SIZES[:1] if session.quick else _SIZES)
    measure(
        session,
        geglu.operators(arguments.rows or _ROWS, sizes, arguments.dtype, session.device),
        title="gated GELU",
        yardstick=geglu.YARDSTICK,
        place=places.geglu,
        names=geglu.NAMES,
        chosen=arguments.implementations,
        targets={},
    )
