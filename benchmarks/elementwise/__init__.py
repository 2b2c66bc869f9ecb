"""Norm, rotary and activation: workloads and peers of the cases `rms_norm`, `rotary` and `geglu`."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.operators import Implementation, Operator
    from benchmarks.session import Session

DTYPES = ("bf16", "fp16", "fp32")

Row = Mapping[str, Any]


def add_common_arguments(parser: ArgumentParser) -> None:
    """Add the options that the three cases share."""
    parser.add_argument("--implementations", nargs="+", metavar="NAME", help="by default all")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bf16"], help="types")
    parser.add_argument("--rows", type=int, metavar="N", help="tokens of a batch, instead of the case's own")


def measure(
    session: Session,
    operators: Iterable[tuple[Operator, Sequence[Implementation]]],
    *,
    title: str,
    yardstick: str,
    place: Callable[[Row], str],
    names: Sequence[str],
    chosen: Sequence[str] | None,
    targets: Mapping[tuple[str, str], float],
) -> None:
    """Measure operators, one after the other, and print the table and what was missed."""
    from benchmarks.bandwidth import copy_speed, show, time_claims
    from benchmarks.registry import UsageError
    from benchmarks.tables import problems
    from fat5.errors import nearest

    for name in chosen or ():
        if name not in names:
            hint = nearest(name, names)
            raise UsageError(f"no implementation {name!r}; expected some of {', '.join(names)}{hint}")
    speed = copy_speed(session)
    rows: list[dict[str, Any]] = []
    for operator, implementations in operators:
        for implementation in implementations:
            if chosen is None or implementation.name in chosen:
                rows += session.measure(operator.subject(implementation, yardstick=yardstick, copy_gb_per_s=speed))
    print(f"\n{title}, beside a copy at {speed or 0:.0f} GB/s\n{show(rows, place)}")
    claims = time_claims(rows, targets, "fat5-triton", place)
    print("\n" + "\n".join(map(str, claims)))
    for equal, verdict in ((True, "bit-equal"), (False, "NOT bit-equal")):
        same = sorted({row["implementation"] for row in rows if row.get("bit_equal") is equal})
        if same:
            print(f"two runs of forward and backward {verdict}: {', '.join(same)}")
    print(problems(rows, place))


def needs_gpu() -> str | None:
    """Return why a peer's Triton kernels cannot run here, or None."""
    import torch

    return None if torch.cuda.is_available() else "there is no CUDA GPU"


def needs_liger() -> str | None:
    """Return why Liger-Kernel cannot run here, or None."""
    if find_spec("liger_kernel") is None:
        return "Liger-Kernel is not installed; pip install liger-kernel"
    return needs_gpu()


def own_unavailable() -> str | None:
    """Return why FAT5's kernels cannot run here, or None."""
    from fat5.ops.attention.backends import BACKENDS

    return BACKENDS["triton"]()
