"""Rotary embedding: forward and backward beside its peers and the speed of a copy."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from benchmarks.elementwise import add_common_arguments, measure

if TYPE_CHECKING:
    from benchmarks.session import Session

SUMMARY = "rotary embedding of queries and keys, beside eager PyTorch, torch.compile and Liger-Kernel"

_ROWS, _SIZES = (
    16_384,
    (
        64,
        128,
    ),
)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the case's options."""
    add_common_arguments(parser)
    parser.add_argument("--head-dims", type=int, nargs="+", metavar="N", help="instead of the case's own")


def run(arguments: Namespace, session: Session) -> None:
    """Measure and print the table."""
    from benchmarks.elementwise import places, rotary

    sizes = arguments.head_dims or (_SIZES[:1] if session.quick else _SIZES)
    measure(
        session,
        rotary.operators(arguments.rows or _ROWS, sizes, arguments.dtype, session.device),
        title="rotary embedding",
        yardstick=rotary.YARDSTICK,
        place=places.rotary,
        names=rotary.NAMES,
        chosen=arguments.implementations,
        targets={},
    )
