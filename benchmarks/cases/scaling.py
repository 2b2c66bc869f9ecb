"""Pretraining by several GPUs beside one: speed, memory, communication, losses, and checkpoints between them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.session import Session
    from benchmarks.tables import Claim

SUMMARY = "pretraining by several GPUs (DDP, FSDP2) beside one: tokens/s, memory, communication, losses, resuming"

_STEPS, _QUICK_STEPS, _TOY_STEPS = 80, 40, 8


def add_arguments(parser: ArgumentParser) -> None:
    """Add the case's options."""
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    models = "small (147 M), base (305 M), toy; by default the first two, without a GPU the last"
    parser.add_argument("--models", nargs="+", choices=("small", "base", "toy"), metavar="MODEL", help=models)
    parser.add_argument("--processes", help="one a GPU; by default as many as GPUs, 2 without any", **number)
    strategies = "ddp: a copy each; fsdp2: one copy between them"
    parser.add_argument(
        "--strategies", nargs="+", choices=("ddp", "fsdp2"), default=["ddp", "fsdp2"], metavar="NAME", help=strategies
    )
    steps = f"optimizer steps of a run, by default {_STEPS}, {_QUICK_STEPS} with --quick, {_TOY_STEPS} without a GPU"
    parser.add_argument("--steps", help=steps, **number)
    parser.add_argument("--no-resume", action="store_true", help="do not go on from the checkpoints; so too --quick")
    parser.add_argument("--no-compile", action="store_true", help="eager; so too without a GPU")
    parser.add_argument("--train", type=Path, metavar="DIR", help="token files, by default of the shipped sample")
    parser.add_argument("--minutes", type=float, default=8.0, metavar="N", help="longest time of a run")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="more settings of every run")


def run(arguments: Namespace, session: Session) -> None:
    """Train one run after the other; each is printed as it comes, the figures to reach at the end."""
    import tempfile

    from benchmarks.precision.runs import prepare_text
    from benchmarks.scaling import report
    from benchmarks.scaling.plan import Scale
    from benchmarks.scaling.stage import Stage, Tolerance, clear
    from benchmarks.tables import problems
    from fat5.data.pretokenize import TRAIN

    on_gpu = session.device.type == "cuda"
    processes, steps = _checked(arguments, quick=session.quick, on_gpu=on_gpu)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if arguments.train is None:
            prepare_text(folder)
        tokens = (arguments.train or folder / "tokens" / TRAIN).resolve()
        print(report.HEADER, flush=True)
        for model in arguments.models or (("small", "base") if on_gpu else ("toy",)):
            scale = Scale(
                model,
                processes,
                steps,
                tokens,
                folder / model,
                compiled=on_gpu and not arguments.no_compile,
                saves=not (arguments.no_resume or session.quick),
            )
            stage = Stage(
                scale,
                arguments.strategies,
                resume=scale.saves,
                seconds=60 * arguments.minutes,
                tolerance=Tolerance.of_device(),
                extra=arguments.set,
            )
            for subject in stage.subjects():
                for row in session.measure(subject):
                    rows.append(row)
                    print(report.line(row), flush=True)
            clear(scale)
    print("\n" + "\n".join(map(str, claims(rows))))
    print(problems(rows, report.describe))


def _checked(arguments: Namespace, *, quick: bool, on_gpu: bool) -> tuple[int, int]:
    """Return the numbers of processes and steps.

    Raises:
        UsageError: There are fewer GPUs, there are no such token files, or the steps cannot be divided into log windows
            that are long enough.
    """
    import torch

    from benchmarks.registry import UsageError
    from benchmarks.scaling.plan import LEAST_WINDOW, WINDOWS
    from fat5.errors import nearest_path

    if arguments.train is not None and not arguments.train.is_dir():
        raise UsageError(f"there is no folder {arguments.train}{nearest_path(arguments.train, folder=True)}")
    there = torch.cuda.device_count() if on_gpu else 2
    processes = there if arguments.processes is None else arguments.processes
    if processes < 1 or (on_gpu and processes > there):
        at_most = f" to {there}, one for each GPU" if on_gpu else " or more"
        raise UsageError(f"--processes is {processes}, expected 1{at_most}")
    usual = (_QUICK_STEPS if quick else _STEPS) if on_gpu else _TOY_STEPS
    steps = usual if arguments.steps is None else arguments.steps
    least = WINDOWS * (LEAST_WINDOW if on_gpu else 1)
    if steps < least or steps % WINDOWS:
        raise UsageError(f"--steps is {steps}, expected a multiple of {WINDOWS}, at least {least}")
    return processes, steps


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Return the figures to reach for which the rows of one run have a measurement."""
    from benchmarks.scaling import report

    return report.claims(rows)
