"""The shapes of the Hopper attention's forward: which is fastest at which length."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.session import Session

SUMMARY = "the Hopper attention's forward in each of its shapes (warpgroups, stages, schedule), beside cuDNN"

_LENGTHS, _QUICK_LENGTHS = (512, 1024, 2048, 4096), (1024,)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the case's options."""
    several: dict[str, Any] = {"nargs": "+"}
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    lengths = f"by default {' '.join(map(str, _LENGTHS))}, or {' '.join(map(str, _QUICK_LENGTHS))} with --quick"
    parser.add_argument("--lengths", help=lengths, **several, **number)
    parser.add_argument("--head-dims", type=int, choices=(64, 128), default=[64, 128], help="widths", **several)
    masks = ("full", "causal")
    parser.add_argument("--masks", choices=masks, default=list(masks), help="which keys a query sees", **several)
    parser.add_argument(
        "--consumers", type=int, choices=(2, 3), default=[2, 3], help="warpgroups of 64 queries", **several
    )
    stages = "tiles of keys and values under way"
    parser.add_argument("--stages", type=int, choices=(2, 3, 4), default=[2, 3, 4], help=stages, **several)
    ahead = "whether a tile begins beside the last product of the one before"
    parser.add_argument("--ahead", choices=("yes", "no"), default=["yes", "no"], help=ahead, **several)
    alternate = "whether two warpgroups issue their products in turn"
    parser.add_argument("--alternate", choices=("yes", "no"), default=["yes", "no"], help=alternate, **several)
    halves = "whether queries that see half of their last keys multiply that half alone"
    parser.add_argument("--halves", choices=("yes", "no"), default=["yes", "no"], help=halves, **several)
    chunks = "turns of causal tiles sorted by work together, tried with the fastest shape"
    parser.add_argument("--chunks", default=[2, 4, 8, 16], help=chunks, **several, **number)
    layouts = "how q, k, v lie in memory: the first for all shapes, others for the fastest and today's"
    parser.add_argument("--layouts", choices=("tokens", "heads"), default=["tokens", "heads"], help=layouts, **several)
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16", help="type of q, k and v")
    parser.add_argument("--tokens", default=16_384, help="tokens of a batch", **number)
    parser.add_argument("--heads", default=12, help="number of heads", **number)


def run(arguments: Namespace, session: Session) -> None:
    """Compile all shapes side by side, compare each with the portable kernels, time it, and print the tables."""
    from benchmarks.hopper_forward.report import place, show_all, show_best
    from benchmarks.hopper_forward.sweep import Sweep, measure
    from benchmarks.tables import problems

    sweep = Sweep(
        lengths=arguments.lengths or (_QUICK_LENGTHS if session.quick else _LENGTHS),
        head_dims=arguments.head_dims,
        masks=arguments.masks,
        consumers=arguments.consumers,
        stages=arguments.stages,
        ahead=[choice == "yes" for choice in arguments.ahead],
        alternate=[choice == "yes" for choice in arguments.alternate],
        halves=[choice == "yes" for choice in arguments.halves],
        chunks=arguments.chunks,
        layouts=arguments.layouts,
        tokens=arguments.tokens,
        heads=arguments.heads,
        dtype=arguments.dtype,
    )
    rows = measure(session, sweep)
    print(f"\n{show_all(rows)}\n\n{show_best(rows)}")
    print(problems(rows, place))
