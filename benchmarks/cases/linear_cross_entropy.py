"""Cross-entropy from hidden states, beside PyTorch, torch.compile and Liger-Kernel, and its matrix products alone."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.session import Session
    from benchmarks.tables import Claim

SUMMARY = "linear + cross-entropy, forward and backward, beside torch.compile and Liger-Kernel: time and memory"

ROWS, WIDTH, VOCAB = 16_384, 512, 32_768
TARGET_MS, TARGET_MB = 3.1, 400.0
"""To reach at ROWS x WIDTH to VOCAB in bf16; megabytes beyond inputs and returned gradients."""

_OTHERS = ((16_384, 768, 32_128, 0.0), (16_384, 512, 32_768, 0.5), (4096, 1024, 250_112, 0.0))


def add_arguments(parser: ArgumentParser) -> None:
    """Add the case's options."""
    several: dict[str, Any] = {"nargs": "+"}
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    parser.add_argument("--implementations", metavar="NAME", help="by default all", **several)
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="by default bf16", **several)
    parser.add_argument("--rows", help=f"tokens, {ROWS:,} by default", **number)
    parser.add_argument("--width", help=f"width of the hidden states, {WIDTH} by default", **number)
    parser.add_argument("--vocab", help=f"vocabulary, {VOCAB:,} by default", **number)
    parser.add_argument("--ignored", type=float, metavar="SHARE", help="tokens that are ignored, none by default")
    chunks = "measure the kernels with so many MiB of logits at a time instead of the peers"
    parser.add_argument("--chunk-mib", help=chunks, **several, **number)


def run(arguments: Namespace, session: Session) -> None:
    """Measure and print, the figures to reach last."""
    from benchmarks.loss.implementations import choose, fat5
    from benchmarks.loss.stage import PRODUCTS, Stage
    from benchmarks.loss.workload import Workload
    from benchmarks.tables import problems

    sizes = [(ROWS, WIDTH, VOCAB, 0.0), *(() if session.quick or arguments.chunk_mib else _OTHERS)]
    named = (arguments.rows, arguments.width, arguments.vocab, arguments.ignored)
    if any(value is not None for value in named):
        sizes = [tuple(given if given is not None else usual for given, usual in zip(named, sizes[0], strict=True))]
    workloads = [
        Workload(rows, vocab, width, dtype, ignored)
        for dtype in arguments.dtype or ("bf16",)
        for rows, width, vocab, ignored in sizes
    ]
    chunked = [fat5("triton", chunk_mib=mib) for mib in arguments.chunk_mib or ()]
    chosen = {w: chunked or choose(arguments.implementations, w) for w in workloads}
    rows = []
    for workload, implementations in chosen.items():
        stage = Stage(workload, session.device)
        columns = {"table": "chunks" if chunked else "times"}
        rows += session.measure(stage.products(columns))
        for implementation in implementations:
            rows += session.measure(stage.subject(implementation, columns, PRODUCTS))
    print(f"\nlinear_cross_entropy\n{_show(rows)}\n")
    print("\n".join(map(str, claims(rows))))
    print(problems(rows, place))


def place(row: Mapping[str, Any]) -> str:
    """Return the workload of a row in a few words."""
    ignored = float(row["ignored"])
    words = f"{row['dtype']} {row['rows']} x {row['width']} to {row['vocab']}"
    return f"{words} {ignored:.0%} ignored" if ignored else words


def returned_mb(row: Mapping[str, Any]) -> float:
    """Return the megabytes of the gradients that a step returns."""
    itemsize = 4 if row["dtype"] == "fp32" else 2
    return itemsize * int(row["width"]) * (int(row["rows"]) + int(row["vocab"])) / 1e6


def beyond_mb(row: Mapping[str, Any]) -> float | None:
    """Return the peak beyond inputs and returned gradients, in megabytes."""
    peak = row.get("peak_mib")
    return None if peak in (None, "") else float(peak) * 2**20 / 1e6 - returned_mb(row)


def _show(rows: Sequence[Mapping[str, Any]]) -> str:
    from benchmarks.session import FAILED, OK
    from benchmarks.tables import format_table, number

    header = ["implementation", "ms", "TFLOP/s", "x products", "MB beyond", "gate"]
    lines, last = [], ""
    for row in rows:
        if row["status"] not in (OK, FAILED):
            continue
        if place(row) != last:
            last = place(row)
            lines.append([last, *[""] * 5])
        if row["status"] == FAILED:
            lines.append([f"  {row['implementation']}", FAILED, *[""] * 4])
            continue
        cells = [number(row["p50_ms"]), number(row["tflops"], ".0f"), number(row["ratio"], ".2f")]
        lines.append([f"  {row['implementation']}", *cells, number(beyond_mb(row), ".0f"), number(row["gate"], ".2f")])
    return format_table(header, lines)


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Return the time and the memory to reach for which the rows of one run have a measurement."""
    from benchmarks.loss.workload import Workload
    from benchmarks.session import OK
    from benchmarks.tables import Claim

    standard = place(Workload(ROWS, VOCAB, WIDTH).columns)
    found = []
    for row in rows:
        if row["status"] == OK and row["implementation"].startswith("fat5-triton") and place(row) == standard:
            text = f"{row['implementation']}, {standard}"
            found.append(Claim(text, row["p50_ms"], TARGET_MS, at_most=True, unit=" ms"))
            beyond = f"{text}, beyond inputs and returned gradients"
            found.append(Claim(beyond, beyond_mb(row), TARGET_MB, at_most=True, unit=" MB"))
    return found
