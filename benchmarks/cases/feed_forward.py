"""The gated feed-forward layer: the first product with the activation inside, beside cuBLAS and a kernel of its own."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.session import Session

SUMMARY = "gated feed-forward, its first product fused with the activation, beside cuBLAS and a kernel of its own"

_TOKENS, _QUICK_TOKENS = (32_768, 16_384), (32_768,)
_SIZES = {"512": (512, 2048), "768": (768, 3072), "1024": (1024, 4096)}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the case's options."""
    tokens = f"by default {' '.join(map(str, _TOKENS))}, or {_QUICK_TOKENS[0]} with --quick"
    parser.add_argument("--tokens", type=int, nargs="+", metavar="N", help=tokens)
    widths = "widths of the model, each with four times as many inside"
    parser.add_argument("--d-model", nargs="+", choices=tuple(_SIZES), default=["512", "768"], help=widths)
    parser.add_argument("--tiles", action="store_true", help="try every tile of the kernel, not the present one alone")


def run(arguments: Namespace, session: Session) -> None:
    """Measure and print the tables."""
    from benchmarks.feed_forward import show
    from benchmarks.feed_forward.stage import measure
    from benchmarks.tables import problems

    tokens = arguments.tokens or (_QUICK_TOKENS if session.quick else _TOKENS)
    rows = measure(session, tokens, [_SIZES[name] for name in arguments.d_model], every_tile=arguments.tiles)
    print("\n" + show.table(rows))
    print(problems(rows, show.place))
