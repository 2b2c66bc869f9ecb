"""Attention in a step of decoding: one query, or the beams of an input, beside PyTorch's kernels."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.session import Session

SUMMARY = "attention in a step of decoding: one query to many keys, beside PyTorch's and the speed of a copy"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the case's options."""
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="type of the tensors")


def run(arguments: Namespace, session: Session) -> None:
    """Measure and print the table."""
    import torch

    from benchmarks.bandwidth import copy_speed, show
    from benchmarks.decode_attention import STEPS, TOY, Step, subjects
    from benchmarks.tables import problems

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[arguments.dtype]
    steps = STEPS if session.device.type == "cuda" else TOY
    copy = copy_speed(session)
    rows = [
        row
        for step in (steps[:3] if session.quick else steps)
        for subject in subjects(step, dtype, session.device, copy)
        for row in session.measure(subject)
    ]

    def place(row) -> str:
        return str(Step(**{name: row[name] for name in Step.__dataclass_fields__}))

    print(f"\nattention in a step of decoding, {arguments.dtype}\n{show(rows, place)}")
    print(problems(rows, place))
